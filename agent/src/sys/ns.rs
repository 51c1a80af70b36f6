//! Other processes' namespaces, entered by threads made for that.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::thread::Builder;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use tokio::sync::oneshot;

/// Runs `work` on a thread of its own that sees the file systems and the network of process `pid`; so do its children.
/// The thread ends with it.
///
/// # Errors
/// As open(2) and setns(2) say: `NotFound` when there is no such process in our view of /proc, `PermissionDenied`
/// without `CAP_SYS_ADMIN` and `CAP_SYS_CHROOT`. `work` has not run then.
pub async fn inside<T: Send + 'static>(pid: u32, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let open = |kind: &str| File::open(format!("/proc/{pid}/ns/{kind}"));
    let (mount, net) = (open("mnt")?, open("net")?);
    let (answer, result) = oneshot::channel();
    Builder::new().name("inside".to_owned()).spawn(move || {
        let entered = enter(&mount, &net);
        // Nobody waits any more when the agent is told to stop.
        let _ = answer.send(entered.map(|()| work()));
    })?;
    result.await.map_err(|_| io::Error::other("the thread inside the other process's namespaces panicked"))?
}

fn enter(mount: &File, net: &File) -> io::Result<()> {
    // SAFETY: only root and current directory stop being shared with other threads; no memory or descriptor table is
    // split. The kernel demands it before setns(2) into another mount namespace (setns(2), EINVAL).
    unsafe { unshare_unsafe(UnshareFlags::FS) }?;
    move_into_link_name_space(net.as_fd(), Some(LinkNameSpaceType::Network))?;
    move_into_link_name_space(mount.as_fd(), Some(LinkNameSpaceType::Mount))?;
    Ok(())
}
