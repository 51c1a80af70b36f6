//! Watches: the events of one, and the task that sends them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Shared;
use super::error::ApiError;
use super::faults::{Cut, Effect};
use super::form::Form;
use super::kinds::Kind;
use super::select::Selector;
use super::store::{Change, Store, at_version};

/// What the test wants from all watches that are open.
#[derive(Clone, Copy, Debug)]
pub(super) enum Command {
    Cut(Cut),
    Expire,
    Bookmark,
    Silence,
}

/// What a client watches.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) kind: &'static Kind,
    pub(super) namespace: Option<String>,
    pub(super) selector: Selector,
    pub(super) form: Form,
    pub(super) bookmarks: bool,
    /// Ends by itself after this time.
    pub(super) timeout: Option<Duration>,
}

/// Where a watch starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// With all that is there, as ADDED.
    State,
    /// The same, and a bookmark that says where it ends (`sendInitialEvents`).
    StateWithBookmark,
    /// After this resource version.
    After(u64),
}

/// Time for the connection to send what the channel gave it.
const FLUSH: Duration = Duration::from_millis(20);

type Lines = mpsc::Sender<Result<Bytes, io::Error>>;

fn line(kind: &str, object: &Value) -> Bytes {
    let mut text = json!({ "type": kind, "object": object }).to_string();
    text.push('\n');
    text.into()
}

impl Watch {
    fn wants(&self, object: Option<&Arc<Value>>) -> bool {
        object.is_some_and(|object| self.selector.matches(object))
    }

    /// The event of a change, if this watch sees it. An object that no longer matches is deleted for it, as it was
    /// before; one that begins to is added.
    fn event(&self, change: &Change) -> Option<Bytes> {
        let key = &change.key;
        if key.resource != self.kind.resource
            || self.namespace.as_ref().is_some_and(|ns| *ns != key.namespace)
        {
            return None;
        }
        let (was, is) = (self.wants(change.old.as_ref()), self.wants(change.new.as_ref()));
        let (kind, object) = match (was, is) {
            (false, true) => ("ADDED", change.new.as_deref()?.clone()),
            (true, true) => ("MODIFIED", change.new.as_deref()?.clone()),
            (true, false) => ("DELETED", at_version(change.old.as_deref()?, change.version)),
            (false, false) => return None,
        };
        Some(line(kind, &self.form.show(&object)))
    }

    fn initial(&self, store: &Store) -> Result<Vec<Bytes>, ApiError> {
        let list = store.list(self.kind, self.namespace.as_deref(), store.version())?;
        let wanted = list.iter().filter(|(_, object)| self.selector.matches(object));
        Ok(wanted.map(|(_, object)| line("ADDED", &self.form.show(object))).collect())
    }

    fn bookmark(&self, version: u64, end: bool) -> Bytes {
        line("BOOKMARK", &self.form.bookmark(version, end))
    }
}

/// Why sending stopped.
enum End {
    Clean,
    Abrupt,
    /// 410 as an ERROR event.
    Expired(ApiError),
    /// Nothing more, and no end either.
    Silence,
}

/// Sends events until the watch ends or its client goes away.
pub(super) async fn run(
    shared: Arc<Shared>,
    watch: Watch,
    start: Start,
    fault: Option<Effect>,
    lines: Lines,
) {
    let (_open, command) = shared.count_watch(watch.kind.resource);
    let mut sender = Sender {
        shared: &shared,
        watch: &watch,
        lines: &lines,
        fault,
        sent: 0,
        position: 0,
        began: 0,
        command,
    };
    let end = match sender.follow(start).await {
        Ok(()) => return,
        Err(end) => end,
    };
    match end {
        End::Clean => {}
        End::Abrupt => {
            // What was sent before has to reach the client: the error would overtake it in the connection's buffer.
            drop(lines.reserve_many(lines.max_capacity()).await);
            tokio::time::sleep(FLUSH).await;
            drop(lines.send(Err(io::Error::other("cut by the test"))).await);
        }
        End::Expired(error) => drop(lines.send(Ok(line("ERROR", &error.status()))).await),
        End::Silence => lines.closed().await,
    }
}

struct Sender<'a> {
    shared: &'a Shared,
    watch: &'a Watch,
    lines: &'a Lines,
    fault: Option<Effect>,
    sent: usize,
    /// Resource version of the last change that was looked at.
    position: u64,
    /// Where it started.
    began: u64,
    /// How many of the test's commands have been looked at.
    command: usize,
}

impl Sender<'_> {
    /// `Ok`: the client is gone.
    async fn follow(&mut self, start: Start) -> Result<(), End> {
        if matches!(self.fault, Some(Effect::Stale)) {
            return Err(End::Silence);
        }
        let deadline = self.watch.timeout.map(|timeout| Instant::now() + timeout);
        let mut wake = self.shared.wake.subscribe();
        self.begin(start).await?;
        loop {
            wake.borrow_and_update();
            self.shared.thawed().await;
            if let Some(command) = self.catch_up().await? {
                self.obey(command).await?;
                continue;
            }
            tokio::select! {
                _ = wake.changed() => {}
                () = self.lines.closed() => return Ok(()),
                () = sleep_until(deadline) => {
                    // As the real server: a bookmark before the end, if there is anything newer to say.
                    if self.position > self.began {
                        self.obey(Command::Bookmark).await?;
                    }
                    return Err(End::Clean);
                }
            }
        }
    }

    async fn obey(&self, command: Command) -> Result<(), End> {
        match command {
            Command::Cut(how) => Err(self.cut(how).await),
            Command::Expire => Err(End::Expired(ApiError::of_code(410))),
            Command::Silence => Err(End::Silence),
            Command::Bookmark if self.watch.bookmarks => {
                self.send(self.watch.bookmark(self.position, false)).await;
                Ok(())
            }
            Command::Bookmark => Ok(()),
        }
    }

    async fn begin(&mut self, start: Start) -> Result<(), End> {
        let (position, events) = {
            let state = self.shared.state();
            let events = match start {
                Start::After(_) => Vec::new(),
                _ => self.watch.initial(&state.store).map_err(End::Expired)?,
            };
            (state.store.version(), events)
        };
        self.position = if let Start::After(version) = start { version } else { position };
        self.began = self.position;
        self.check_fault().await?;
        for event in events {
            self.send_event(event).await?;
        }
        if start == Start::StateWithBookmark && self.watch.bookmarks {
            self.send(self.watch.bookmark(position, true)).await;
        }
        Ok(())
    }

    /// Sends what has changed up to the next command, and gives that, if there is one.
    async fn catch_up(&mut self) -> Result<Option<Command>, End> {
        let (events, position, command) = {
            let state = self.shared.state();
            let command = state.commands.get(self.command).copied();
            let until = command.map_or_else(|| state.store.version(), |(version, _)| version);
            let changes = state.store.since(self.position).map_err(End::Expired)?;
            let changes = changes.iter().take_while(|change| change.version <= until);
            let events: Vec<Bytes> = changes.filter_map(|change| self.watch.event(change)).collect();
            (events, until.max(self.position), command)
        };
        for event in events {
            self.send_event(event).await?;
        }
        self.position = position;
        self.command += usize::from(command.is_some());
        Ok(command.map(|(_, command)| command))
    }

    async fn send_event(&mut self, event: Bytes) -> Result<(), End> {
        self.send(event).await;
        self.sent += 1;
        self.check_fault().await
    }

    async fn check_fault(&mut self) -> Result<(), End> {
        match self.fault {
            Some(Effect::CutAfter(count, how)) if self.sent >= count => Err(self.cut(how).await),
            Some(Effect::ExpireAfter(count)) if self.sent >= count => {
                Err(End::Expired(ApiError::of_code(410)))
            }
            _ => Ok(()),
        }
    }

    async fn cut(&self, how: Cut) -> End {
        match how {
            Cut::Clean => End::Clean,
            Cut::Abrupt => End::Abrupt,
            Cut::MidEvent => {
                let half = Bytes::from_static(b"{\"type\":\"MODIFIED\",\"object\":{\"kind\":");
                drop(self.lines.send(Ok(half)).await);
                End::Abrupt
            }
        }
    }

    async fn send(&self, line: Bytes) {
        // A client that is gone ends the loop by `closed`.
        drop(self.lines.send(Ok(line)).await);
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
