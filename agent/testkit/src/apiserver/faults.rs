//! Faults on demand, and the record of what was asked.

use std::time::Duration;

use serde_json::Value;

use super::error::ApiError;

/// How a watch or an answer breaks off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The body ends as it should, as when the server ends a watch.
    Clean,
    /// The connection is lost.
    Abrupt,
    /// The connection is lost in the middle of an event.
    MidEvent,
}

/// What happens to a request.
#[derive(Clone, Debug)]
pub(super) enum Effect {
    Answer(ApiError),
    /// The connection is closed without an answer.
    Drop,
    /// No answer ever, until the server is stopped.
    Hang,
    /// An answer that is late.
    Delay(Duration),
    /// Something that is no JSON.
    Garbage,
    /// Watches: broken off after so many events.
    CutAfter(usize, Cut),
    /// Watches: an ERROR event with 410 after so many events, and the end.
    ExpireAfter(usize),
    /// Watches: stays open, with no event, no bookmark and no end.
    Stale,
}

impl Effect {
    fn needs_watch(&self) -> bool {
        matches!(self, Self::CutAfter(..) | Self::ExpireAfter(_) | Self::Stale)
    }
}

/// One fault, for requests that it is meant for: all, or those of a verb and a resource.
///
/// ```ignore
/// server.inject(Fault::answer(429).retry_after(1).on("patch", "nodes/status").times(3));
/// server.inject(Fault::cut_after(2, Cut::Abrupt).on("watch", "pods"));
/// ```
#[derive(Clone, Debug)]
pub struct Fault {
    pub(super) effect: Effect,
    verb: String,
    target: String,
    left: usize,
}

impl Fault {
    fn new(effect: Effect) -> Self {
        Self { effect, verb: "*".into(), target: "*".into(), left: 1 }
    }

    /// Answers with this HTTP status and the `Status` that belongs to it: 410, 429, 500, 503, 504, ...
    #[must_use]
    pub fn answer(code: u16) -> Self {
        Self::new(Effect::Answer(ApiError::of_code(code)))
    }

    /// Closes the connection without an answer.
    #[must_use]
    pub fn drop_connection() -> Self {
        Self::new(Effect::Drop)
    }

    /// Never answers.
    #[must_use]
    pub fn hang() -> Self {
        Self::new(Effect::Hang)
    }

    /// Answers late. Other faults for the same request still apply, afterwards.
    #[must_use]
    pub fn delay(time: Duration) -> Self {
        Self::new(Effect::Delay(time))
    }

    /// Answers 200 with something that is no JSON.
    #[must_use]
    pub fn garbage() -> Self {
        Self::new(Effect::Garbage)
    }

    /// Breaks a watch off after it has sent so many events (bookmarks do not count).
    #[must_use]
    pub fn cut_after(events: usize, how: Cut) -> Self {
        Self::new(Effect::CutAfter(events, how))
    }

    /// Ends a watch with an ERROR event that holds 410, after so many events.
    #[must_use]
    pub fn expire_after(events: usize) -> Self {
        Self::new(Effect::ExpireAfter(events))
    }

    /// Leaves a watch open and says nothing in it.
    #[must_use]
    pub fn stale() -> Self {
        Self::new(Effect::Stale)
    }

    /// Seconds of the `Retry-After` header, of [`Fault::answer`].
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        if let Effect::Answer(error) = &mut self.effect {
            error.retry_after = Some(seconds);
        }
        self
    }

    /// Only for requests with this verb (`get`, `list`, `watch`, `create`, `update`, `patch`, `delete`) and this
    /// resource (`pods`, `pods/eviction`); `*` is any.
    #[must_use]
    pub fn on(mut self, verb: &str, target: &str) -> Self {
        self.verb = verb.into();
        self.target = target.into();
        self
    }

    /// For so many requests; else for one.
    #[must_use]
    pub fn times(mut self, count: usize) -> Self {
        self.left = count;
        self
    }

    /// For all requests until [`super::ApiServer::clear_faults`].
    #[must_use]
    pub fn always(self) -> Self {
        self.times(usize::MAX)
    }

    fn concerns(&self, verb: &str, target: &str) -> bool {
        let matches = |pattern: &str, word: &str| pattern == "*" || pattern == word;
        matches(&self.verb, verb)
            && matches(&self.target, target)
            && (!self.effect.needs_watch() || verb == "watch")
    }
}

/// The faults in force, in the order of their injection.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<Fault>);

impl Faults {
    pub(super) fn push(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Takes what is to happen to a request: delays, and the first other effect.
    pub(super) fn take(&mut self, verb: &str, target: &str) -> Vec<Effect> {
        let mut effects = Vec::new();
        for fault in &mut self.0 {
            if fault.left == 0 || !fault.concerns(verb, target) {
                continue;
            }
            if fault.left != usize::MAX {
                fault.left -= 1;
            }
            effects.push(fault.effect.clone());
            if !matches!(fault.effect, Effect::Delay(_)) {
                break;
            }
        }
        self.0.retain(|fault| fault.left > 0);
        effects
    }
}

/// One request that arrived.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// As in RBAC rules: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: &'static str,
    /// As in RBAC rules: `pods`, `pods/eviction`.
    pub target: String,
    /// The API group of the path; empty for the core group.
    pub group: String,
    pub namespace: Option<String>,
    pub name: Option<String>,
    /// The query as it was sent.
    pub query: String,
    pub content_type: String,
    pub user_agent: String,
    /// The body of a write; `Null` if it had none.
    pub body: Value,
    /// The HTTP status of the answer; `None` while there is none.
    pub status: Option<u16>,
}

impl Recorded {
    /// Did it mean to change something? An access review does not.
    #[must_use]
    pub fn is_write(&self) -> bool {
        !matches!(self.verb, "get" | "list" | "watch") && self.target != "selfsubjectaccessreviews"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_used_up_by_those_they_are_for() {
        let mut faults = Faults::default();
        faults.push(Fault::answer(500).on("list", "pods").times(2));
        faults.push(Fault::delay(Duration::ZERO).on("*", "nodes"));
        faults.push(Fault::answer(429).on("*", "nodes"));
        faults.push(Fault::stale());
        for (verb, target, want) in [
            ("get", "pods", ""),
            ("list", "pods", "500"),
            ("patch", "nodes", "delay 429"),
            ("patch", "nodes", ""),
            ("list", "pods", "500"),
            ("list", "pods", ""),
            ("watch", "pods", "stale"),
            ("watch", "pods", ""),
        ] {
            let word = |effect: &Effect| match effect {
                Effect::Answer(error) => error.code.to_string(),
                Effect::Delay(_) => "delay".into(),
                Effect::Stale => "stale".into(),
                other => format!("{other:?}"),
            };
            let got: Vec<String> = faults.take(verb, target).iter().map(word).collect();
            assert_eq!(got.join(" "), want, "{verb} {target}");
        }
    }
}
