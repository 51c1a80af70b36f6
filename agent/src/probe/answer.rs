//! What a probe can say of one IP family of a pod.

/// The answer of one probe for one IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// A new connection is redirected to this port of the pod.
    Redirected { port: u16 },
    /// A new connection leaves by the device with this index.
    NotRedirected { ifindex: u32 },
    /// The family has no route: nothing can leave.
    NoRoute,
    /// The question could not be asked, for a bounded reason; never to be taken for one of the others.
    Failed { reason: &'static str },
}
