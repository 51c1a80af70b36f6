//! Follows one collection of the API server: all that is there, then every change, whatever happens to the server.
//!
//! The rules are those of the API's documentation
//! (<https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes>) and of client-go's
//! reflector, which the API server is built for: a listing after the first one asks for nothing older than what was
//! seen (another server may lag behind), and the server's cache answers it, not etcd.

use std::marker::PhantomData;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Limited};
use hyper::{Request, Response};
use kube::Client;
use kube::api::{ListParams, VersionMatch, WatchParams};
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use super::error::{RequestError, Status};
use crate::backoff::Backoff;

/// The longest object that is taken; etcd refuses more than 1.5 MB.
const LONGEST: usize = 16 << 20;
/// The longest listing without pages.
const LARGEST: usize = 512 << 20;
/// The most that is read of a refusal.
const REFUSAL: usize = 64 << 10;
/// The annotation on the bookmark that ends a streamed listing.
const INITIAL_END: &str = "k8s.io/initial-events-end";

/// How patient a watch is.
#[derive(Debug, Clone)]
pub struct Patience {
    /// How long the answer to a request may take to begin, and a listing to end.
    pub answer: Duration,
    /// How long a watch may say nothing. Servers send a bookmark about once a minute; one that does not is asked
    /// again, which costs little.
    pub silence: Duration,
    /// How long a watch is asked to last, give or take a fifth.
    pub watch: Duration,
    /// The first pause after a failure, and the longest.
    pub pauses: (Duration, Duration),
    /// Objects on a page of a listing, where the server has pages.
    pub page: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(60),
            silence: Duration::from_secs(150),
            watch: Duration::from_secs(450),
            pauses: (Duration::from_millis(500), Duration::from_secs(30)),
            page: 100,
        }
    }
}

/// What is followed.
#[derive(Debug, Clone)]
pub struct Collection {
    /// The API group; empty for the core.
    pub group: &'static str,
    /// The resource's plural name.
    pub resource: &'static str,
    /// The URL's path.
    pub path: &'static str,
    /// Only objects with these fields.
    pub field_selector: Option<String>,
    /// The server shall leave everything but the metadata out.
    pub metadata_only: bool,
}

/// An object, trimmed to what its reader wants.
pub trait Object: DeserializeOwned {
    /// `metadata.resourceVersion`.
    fn resource_version(&self) -> &str;
}

/// What a reader is told.
#[derive(Debug)]
pub enum Change<T> {
    /// A listing begins: what is not mentioned until [`Change::Listed`] does not exist any more.
    Listing,
    /// The object exists, in this form.
    Applied(T),
    /// The object is no more; its last form.
    Deleted(T),
    /// The listing is complete.
    Listed,
    /// The server speaks to us: a watch began, or a bookmark came.
    Alive,
    /// It failed; it will be tried again.
    Failed(RequestError),
}

/// Follows `collection` until nobody takes the changes any more.
pub async fn follow<T: Object>(
    client: Client,
    collection: Collection,
    patience: Patience,
    out: mpsc::Sender<Change<T>>,
) {
    let (first, longest) = patience.pauses;
    let mut watch = Watch {
        client,
        collection,
        backoff: Backoff::new(first, longest),
        patience,
        out,
        position: None,
        newest: String::new(),
        streams: true,
        object: PhantomData,
    };
    loop {
        let Err(ended) = watch.session().await;
        let Ended::Failed(error) = ended else { return };
        let pause = watch.after(&error);
        if watch.tell(Change::Failed(error)).await.is_err() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = watch.out.closed() => return,
        }
    }
}

/// Why a session ended.
enum Ended {
    /// Nobody listens.
    Closed,
    Failed(RequestError),
}

impl From<RequestError> for Ended {
    fn from(error: RequestError) -> Self {
        Self::Failed(error)
    }
}

struct Watch<T> {
    client: Client,
    collection: Collection,
    patience: Patience,
    backoff: Backoff,
    out: mpsc::Sender<Change<T>>,
    /// From where to watch; `None` asks for a listing.
    position: Option<String>,
    /// The newest resource version seen, for a listing that is not older. Empty: the newest that the server can get.
    newest: String,
    /// Whether the server may know streamed listings.
    streams: bool,
    object: PhantomData<T>,
}

#[derive(Deserialize)]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
enum Event<T> {
    Added(T),
    Modified(T),
    Deleted(T),
    Bookmark(Bookmark),
    Error(Status),
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: BookmarkMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMeta {
    resource_version: String,
    #[serde(default)]
    annotations: Option<std::collections::BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct List<T> {
    metadata: ListMeta,
    // Null when there are none.
    items: Option<Vec<T>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    #[serde(default)]
    resource_version: String,
    #[serde(default)]
    r#continue: String,
}

impl<T: Object> Watch<T> {
    /// Lists if need be, then watches until the stream ends. Never `Ok` for good: the caller goes on.
    async fn session(&mut self) -> Result<std::convert::Infallible, Ended> {
        loop {
            match self.position.clone() {
                Some(version) => self.watch(&version, false).await?,
                None if self.streams => {
                    // Without a version: a consistent read, which the server's cache can give.
                    let version = self.newest.clone();
                    match self.watch(&version, true).await {
                        Err(Ended::Failed(error)) if does_not_stream(&error) => {
                            tracing::debug!(%error, resource = self.collection.resource, "no streamed listings");
                            self.streams = false;
                        }
                        other => other?,
                    }
                }
                None => self.list().await?,
            }
        }
    }

    /// What a failure changes, and how long to pause.
    fn after(&mut self, error: &RequestError) -> Duration {
        let listing = self.position.is_none();
        let pause = if error.is_gone() && !listing {
            // The history is lost, not the server: list at once, but not all nodes at the same moment.
            self.backoff.about(self.patience.pauses.0)
        } else {
            self.backoff.pause()
        };
        // An event that cannot be read would come again and again.
        if error.is_gone() || matches!(error, RequestError::Unreadable(_)) {
            self.position = None;
        }
        // A server may never get as far as the one we heard that version from (restored from a backup).
        if listing && (error.is_gone() || error.reason() == "timeout") {
            self.newest.clear();
        }
        pause.max(error.retry_after().unwrap_or_default().min(self.patience.pauses.1))
    }

    async fn tell(&self, change: Change<T>) -> Result<(), Ended> {
        self.out.send(change).await.map_err(|_| Ended::Closed)
    }

    async fn list(&mut self) -> Result<(), Ended> {
        self.tell(Change::Listing).await?;
        let mut next = None;
        loop {
            let page = self.page(next.take()).await?;
            for object in page.items.unwrap_or_default() {
                self.tell(Change::Applied(object)).await?;
            }
            let ListMeta { resource_version, r#continue } = page.metadata;
            if r#continue.is_empty() {
                if resource_version.is_empty() {
                    return Err(RequestError::Unreadable("a list without a resourceVersion".into()).into());
                }
                self.newest.clone_from(&resource_version);
                self.position = Some(resource_version);
                self.backoff.reset();
                return self.tell(Change::Listed).await;
            }
            next = Some(r#continue);
        }
    }

    async fn page(&self, next: Option<String>) -> Result<List<T>, RequestError> {
        let mut params =
            ListParams { field_selector: self.collection.field_selector.clone(), ..ListParams::default() };
        if next.is_some() {
            params.limit = Some(self.patience.page);
            params.continue_token = next;
        } else if self.newest.is_empty() {
            params.limit = Some(self.patience.page);
        } else {
            // Without pages, or the server would ask etcd.
            params.resource_version = Some(self.newest.clone());
            params.version_match = Some(VersionMatch::NotOlderThan);
        }
        let request = kube::core::Request::new(self.collection.path);
        let request = if self.collection.metadata_only {
            request.list_metadata(&params)
        } else {
            request.list(&params)
        };
        let body = self.send("list", request).await?.into_body();
        let body = timeout(self.patience.answer, Limited::new(body, LARGEST).collect()).await;
        let body = body.map_err(|_| RequestError::Silent(self.patience.answer))?;
        let body = body.map_err(|error| RequestError::Unreachable(error.to_string()))?.to_bytes();
        serde_json::from_slice(&body).map_err(|error| RequestError::Unreadable(error.to_string()))
    }

    /// One watch. `Ok` when the server ended it as it should, and it was of use.
    async fn watch(&mut self, version: &str, mut initial: bool) -> Result<(), Ended> {
        let params = WatchParams {
            field_selector: self.collection.field_selector.clone(),
            timeout: u32::try_from(self.backoff.about(self.patience.watch).as_secs()).ok(),
            send_initial_events: initial,
            ..WatchParams::default()
        };
        let request = kube::core::Request::new(self.collection.path);
        let request = if self.collection.metadata_only {
            request.watch_metadata(&params, version)
        } else {
            request.watch(&params, version)
        };
        let started = Instant::now();
        let mut lines = Lines::new(self.send("watch", request).await?.into_body());
        self.tell(if initial { Change::Listing } else { Change::Alive }).await?;
        let mut useful = false;
        loop {
            // What is there comes in one go.
            let patience = if initial { self.patience.answer } else { self.patience.silence };
            let deadline = if initial { started + patience } else { Instant::now() + patience };
            let line =
                timeout_at(deadline, lines.next()).await.map_err(|_| RequestError::Silent(patience))?;
            let Some(line) = line? else {
                useful |= started.elapsed() >= self.patience.pauses.0;
                // A server that ends each watch at once must not be asked in a loop.
                return if initial || !useful {
                    Err(RequestError::Cut("it ended early".into()).into())
                } else {
                    Ok(())
                };
            };
            let event = serde_json::from_slice::<Event<T>>(&line);
            let event = event.map_err(|error| RequestError::Unreadable(error.to_string()))?;
            self.event(event, &mut initial).await?;
            useful = true;
        }
    }

    async fn event(&mut self, event: Event<T>, initial: &mut bool) -> Result<(), Ended> {
        let (version, change) = match event {
            Event::Added(object) | Event::Modified(object) => {
                (object.resource_version().to_owned(), Change::Applied(object))
            }
            Event::Deleted(object) => (object.resource_version().to_owned(), Change::Deleted(object)),
            Event::Bookmark(Bookmark { metadata: BookmarkMeta { resource_version, annotations } }) => {
                let ends = annotations.is_some_and(|all| all.contains_key(INITIAL_END));
                let listed = *initial && ends;
                *initial &= !ends;
                (resource_version, if listed { Change::Listed } else { Change::Alive })
            }
            Event::Error(status) => return Err(self.refused("watch", status, None).into()),
        };
        // The versions of a listing's objects are in no order: only its end is a place to go on from.
        if !*initial && !version.is_empty() {
            self.newest.clone_from(&version);
            self.position = Some(version);
            self.backoff.reset();
        }
        self.tell(change).await
    }

    async fn send(
        &self,
        verb: &'static str,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Response<Body>, RequestError> {
        let request = request.map_err(|error| RequestError::Unreadable(error.to_string()))?;
        let answer = timeout(self.patience.answer, self.client.send(request.map(Body::from))).await;
        let answer = answer.map_err(|_| RequestError::Silent(self.patience.answer))?;
        let answer = answer.map_err(|error| RequestError::Unreachable(chain(&error)))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let code = answer.status().as_u16();
        let after = answer.headers().get(hyper::header::RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_secs);
        let body = timeout(self.patience.answer, Limited::new(answer.into_body(), REFUSAL).collect()).await;
        let body =
            body.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes).unwrap_or_default();
        Err(self.refused(verb, Status::read(code, &body), after))
    }

    fn refused(&self, verb: &'static str, status: Status, after: Option<Duration>) -> RequestError {
        let Collection { group, resource, .. } = self.collection;
        status.into_error(verb, group, resource, after)
    }
}

/// Whether a failure means that the server has no streamed listings: it says so (feature gate off), or does not know
/// of them and never ends the first part.
fn does_not_stream(error: &RequestError) -> bool {
    matches!(error, RequestError::Status { code: 400 | 405 | 422, .. } | RequestError::Silent(_))
}

/// An error with its causes: hyper's own text is of little use.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// The lines of a body.
struct Lines {
    body: Body,
    buffer: BytesMut,
    /// How much of the buffer is known to have no end of line.
    searched: usize,
}

impl Lines {
    fn new(body: Body) -> Self {
        Self { body, buffer: BytesMut::new(), searched: 0 }
    }

    /// The next line; `None` at the end. What follows the last end of line is half an event and is dropped: a watch
    /// that goes on from the last whole one tells it again.
    async fn next(&mut self) -> Result<Option<Bytes>, RequestError> {
        loop {
            let rest = self.buffer.get(self.searched..).unwrap_or_default();
            if let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
                let mut line = self.buffer.split_to(self.searched + at + 1);
                self.searched = 0;
                line.truncate(line.len() - 1);
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return Ok(Some(line.freeze()));
            }
            self.searched = self.buffer.len();
            if self.searched > LONGEST {
                return Err(RequestError::Unreadable(format!("an event of more than {LONGEST} bytes")));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(RequestError::Cut(chain(&error))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}
