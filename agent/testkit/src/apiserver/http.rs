//! The HTTP side: what a request asks, and its answer.

use std::borrow::Cow;
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, RETRY_AFTER, USER_AGENT};
use hyper::{Method, Request, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::delete::{self, Deleted, Options};
use super::error::ApiError;
use super::faults::{Effect, Recorded};
use super::form::Form;
use super::kinds::Route;
use super::patch::PatchType;
use super::select::Selector;
use super::watch::{self, Start, Watch};
use super::write;
use super::{Shared, State};

type Body = BoxBody<Bytes, io::Error>;

/// One request.
struct Call {
    verb: &'static str,
    route: Route,
    query: HashMap<String, String>,
    form: Form,
    patch: Option<PatchType>,
    body: Value,
}

impl Call {
    fn param(&self, name: &str) -> &str {
        self.query.get(name).map(String::as_str).unwrap_or_default()
    }

    fn flag(&self, name: &str) -> bool {
        matches!(self.param(name), "true" | "1")
    }

    fn dry_run(&self) -> bool {
        self.param("dryRun") == "All"
    }
}

/// Answers one request; an error closes its connection.
pub(super) async fn handle(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Body>, io::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let path = parts.uri.path().to_owned();
    let query = parts.uri.query().unwrap_or_default();
    let Some(route) = Route::parse(&path) else {
        shared.thawed().await;
        return Ok(other_path(&path));
    };
    let text = |name| header(&parts.headers, name);
    let pairs: HashMap<String, String> = form_urlencoded::parse(query.as_bytes())
        .map(|(k, v): (Cow<'_, str>, Cow<'_, str>)| (k.into(), v.into()))
        .collect();
    let watches = pairs.get("watch").is_some_and(|watch| matches!(watch.as_str(), "true" | "1"));
    let call = Call {
        verb: verb(&parts.method, route.name.is_some(), watches),
        form: Form::of(&route, &text(ACCEPT)),
        patch: PatchType::of_content_type(&text(CONTENT_TYPE)),
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        query: pairs,
        route,
    };
    let (index, effects) = {
        let mut state = shared.state();
        state.requests.push(Recorded {
            verb: call.verb,
            target: call.route.target(),
            group: call.route.group.clone(),
            namespace: call.route.namespace.clone(),
            name: call.route.name.clone(),
            query: query.to_owned(),
            content_type: text(CONTENT_TYPE),
            user_agent: text(USER_AGENT),
            body: call.body.clone(),
            status: None,
        });
        (state.requests.len() - 1, state.faults.take(call.verb, &call.route.target()))
    };
    shared.thawed().await;
    let response = respond(&shared, call, effects, body.is_empty()).await?;
    if let Some(recorded) = shared.state().requests.get_mut(index) {
        recorded.status = Some(response.status().as_u16());
    }
    Ok(response)
}

fn header(headers: &HeaderMap, name: hyper::header::HeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

fn verb(method: &Method, named: bool, watches: bool) -> &'static str {
    match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if named => "delete",
        Method::DELETE => "deletecollection",
        _ if watches => "watch",
        _ if named => "get",
        _ => "list",
    }
}

async fn respond(
    shared: &Arc<Shared>,
    call: Call,
    effects: Vec<Effect>,
    empty: bool,
) -> Result<Response<Body>, io::Error> {
    let mut of_watch = None;
    for effect in effects {
        match effect {
            Effect::Answer(error) => return Ok(failure(&error)),
            Effect::Drop => return Err(io::Error::other("dropped by the test")),
            Effect::Hang => std::future::pending().await,
            Effect::Delay(time) => tokio::time::sleep(time).await,
            Effect::Garbage => return Ok(answer(200, "text/html", "<html>502 Bad Gateway</html>".into())),
            effect => of_watch = Some(effect),
        }
    }
    let done = match call.verb {
        "watch" => return Ok(start_watch(shared, call, of_watch).unwrap_or_else(|error| failure(&error))),
        verb => shared.change(|state| {
            permitted(state, &call)?;
            perform(state, verb, &call, empty)
        }),
    };
    Ok(match done {
        Ok((code, object)) => answer(code, "application/json", object.to_string().into()),
        Err(error) => failure(&error),
    })
}

fn permitted(state: &State, call: &Call) -> Result<(), ApiError> {
    let target = call.route.target();
    if !state.is_denied(call.verb, &target) {
        return Ok(());
    }
    let group = &call.route.group;
    let who = "User \"test\" cannot";
    let message =
        format!("{target} is forbidden: {who} {} resource \"{target}\" in API group \"{group}\"", call.verb);
    Err(ApiError::new(403, "Forbidden", message))
}

fn perform(state: &mut State, verb: &str, call: &Call, empty: bool) -> Result<(u16, Value), ApiError> {
    let route = &call.route;
    let sent = || -> Result<Value, ApiError> {
        if call.body.is_null() {
            return Err(ApiError::bad_request("the body of the request is not valid JSON"));
        }
        Ok(call.form.read(call.body.clone()))
    };
    let dry = call.dry_run();
    match (verb, route.subresource.as_deref()) {
        ("list", _) => list(state, call),
        ("get", None | Some("status")) => {
            let found = write::existing(&state.store, route.kind, &write::key_of(route)?)?;
            Ok((200, call.form.show(&found)))
        }
        ("create", Some("eviction")) => {
            delete::evict(&mut state.store, route, &sent()?, &state.budgets)?;
            Ok((201, success(201, Value::Null)))
        }
        ("create", Some("binding")) => {
            write::bind(&mut state.store, route, &sent()?)?;
            Ok((201, success(201, Value::Null)))
        }
        ("create", None) if route.kind.resource == "selfsubjectaccessreviews" => {
            Ok((201, review(state, sent()?)))
        }
        ("create", None) => {
            let made = write::create(&mut state.store, route, sent()?, dry)?;
            Ok((201, call.form.show(&made)))
        }
        ("update", _) => Ok((200, call.form.show(&*write::update(&mut state.store, route, sent()?, dry)?))),
        ("patch", _) => {
            let how = call.patch.ok_or_else(|| {
                let message = "the body of the request was in an unknown format - accepted media types include: \
                               application/json-patch+json, application/merge-patch+json, \
                               application/strategic-merge-patch+json, application/apply-patch+yaml";
                ApiError::new(415, "UnsupportedMediaType", message)
            })?;
            if how == PatchType::Apply && call.param("fieldManager").is_empty() {
                return Err(ApiError::invalid_options(
                    "PatchOptions",
                    "fieldManager: Required value: is required for apply patch",
                ));
            }
            let existed = state.store.get(&write::key_of(route)?).is_some();
            let made = write::patch(&mut state.store, route, how, &sent()?, dry)?;
            Ok((if existed { 200 } else { 201 }, call.form.show(&made)))
        }
        ("delete", None) => {
            if !empty && call.body.is_null() {
                return Err(ApiError::bad_request("the body of the request is not valid JSON"));
            }
            let mut options =
                Options::read(&call.body).with_grace(call.param("gracePeriodSeconds").parse().ok());
            options.dry_run |= dry;
            deleted(call, delete::delete(&mut state.store, route, &options)?)
        }
        _ => Err(ApiError::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )),
    }
}

/// Pods come back as objects, what else is gone as a `Status`.
fn deleted(call: &Call, deleted: Deleted) -> Result<(u16, Value), ApiError> {
    let kind = call.route.kind;
    Ok((
        200,
        match deleted {
            Deleted::Gone(object) if kind.resource != "pods" => {
                let metadata = &object["metadata"];
                let mut details =
                    json!({ "name": metadata["name"], "kind": kind.resource, "uid": metadata["uid"] });
                if !kind.group.is_empty() {
                    details["group"] = json!(kind.group);
                }
                success(0, details)
            }
            Deleted::Gone(object) | Deleted::Terminating(object) => call.form.show(&object),
        },
    ))
}

fn review(state: &State, mut review: Value) -> Value {
    let asked = &review["spec"]["resourceAttributes"];
    let text = |field: &str| asked[field].as_str().unwrap_or_default();
    let target = match text("subresource") {
        "" => text("resource").to_owned(),
        sub => format!("{}/{sub}", text("resource")),
    };
    let allowed = !state.is_denied(text("verb"), &target);
    review["status"] = json!({ "allowed": allowed });
    review["metadata"] = json!({ "creationTimestamp": null });
    review["kind"] = json!("SelfSubjectAccessReview");
    review["apiVersion"] = json!("authorization.k8s.io/v1");
    review
}

/// Checks `resourceVersion` and `resourceVersionMatch`; gives the version asked for, if any.
fn asked_version(call: &Call, current: u64) -> Result<Option<u64>, ApiError> {
    let (version, how) = (call.param("resourceVersion"), call.param("resourceVersionMatch"));
    let initial = call.query.get("sendInitialEvents");
    let wrong = |what: &str| Err(ApiError::invalid_options("ListOptions", what));
    if call.verb == "watch" && initial.is_some() && how != "NotOlderThan" {
        return wrong(
            "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
        );
    }
    if call.verb == "watch" && initial.is_none() && !how.is_empty() {
        return wrong(
            "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
        );
    }
    if call.verb == "list" {
        if initial.is_some() {
            return wrong("sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list");
        }
        if !how.is_empty() && version.is_empty() {
            return wrong(
                "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided",
            );
        }
        if !how.is_empty() && !call.param("continue").is_empty() {
            return wrong(
                "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden when continue is provided",
            );
        }
        if how == "Exact" && version == "0" {
            return wrong(
                "resourceVersionMatch: Forbidden: resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
            );
        }
    }
    if version.is_empty() {
        return Ok(None);
    }
    let Ok(asked) = version.parse::<u64>() else {
        return Err(ApiError::bad_request(format!(
            "Invalid value: \"{version}\": strconv.ParseUint: invalid syntax"
        )));
    };
    let waits = call.verb == "list" || initial.is_some();
    if waits && asked > current {
        return Err(ApiError::too_large(asked, current));
    }
    Ok(Some(asked))
}

fn list(state: &State, call: &Call) -> Result<(u16, Value), ApiError> {
    let route = &call.route;
    let selector = Selector::parse(route.kind, call.param("fieldSelector"), call.param("labelSelector"))?;
    let current = state.store.version();
    let asked = asked_version(call, current)?;
    // From the cache, which has no pages.
    let limit =
        if asked == Some(0) { None } else { call.param("limit").parse::<usize>().ok().filter(|n| *n > 0) };
    let mut version = current;
    let mut first = String::new();
    if !call.param("continue").is_empty() {
        let token =
            page(call.param("continue")).ok_or_else(|| ApiError::bad_request("continue key is not valid"))?;
        (version, first) = token;
        if asked.is_some_and(|asked| asked > 0) {
            return Err(ApiError::bad_request(
                "specifying resource version is not allowed when using continue",
            ));
        }
    } else if let Some(asked) = asked.filter(|asked| *asked > 0)
        && (call.param("resourceVersionMatch") == "Exact"
            || (limit.is_some() && call.param("resourceVersionMatch").is_empty()))
    {
        version = asked;
    }
    let all = state
        .store
        .list(route.kind, route.namespace.as_deref(), version)
        .map_err(|error| if first.is_empty() { error } else { expired_page() })?;
    let mut items = Vec::new();
    let mut metadata = json!({ "resourceVersion": version.to_string() });
    let place = |namespace: &str, name: &str| format!("{namespace}/{name}");
    let rest = all
        .iter()
        .filter(|(key, object)| place(&key.namespace, &key.name) > first && selector.matches(object));
    let rest: Vec<_> = rest.collect();
    for (key, object) in &rest {
        items.push(call.form.item(object));
        if Some(items.len()) == limit && items.len() < rest.len() {
            let token = json!({ "rv": version, "start": place(&key.namespace, &key.name) }).to_string();
            metadata["continue"] = json!(STANDARD.encode(token));
            if selector.is_empty() {
                metadata["remainingItemCount"] = json!(rest.len() - items.len());
            }
            break;
        }
    }
    Ok((200, call.form.list(&items, &metadata)))
}

fn page(token: &str) -> Option<(u64, String)> {
    let token: Value = serde_json::from_slice(&STANDARD.decode(token).ok()?).ok()?;
    Some((token["rv"].as_u64()?, token["start"].as_str()?.to_owned()))
}

fn expired_page() -> ApiError {
    let message = "The provided continue parameter is too old to display a consistent list result. You can start a \
                   new list without the continue parameter.";
    ApiError::new(410, "Expired", message)
}

fn start_watch(shared: &Arc<Shared>, call: Call, fault: Option<Effect>) -> Result<Response<Body>, ApiError> {
    let (asked, selector) = {
        let state = shared.state();
        permitted(&state, &call)?;
        let selector =
            Selector::parse(call.route.kind, call.param("fieldSelector"), call.param("labelSelector"))?;
        (asked_version(&call, state.store.version())?, selector)
    };
    let start = match asked {
        _ if call.flag("sendInitialEvents") => Start::StateWithBookmark,
        None | Some(0) => Start::State,
        Some(version) => Start::After(version),
    };
    let watch = Watch {
        kind: call.route.kind,
        selector,
        bookmarks: call.flag("allowWatchBookmarks"),
        timeout: call.param("timeoutSeconds").parse().ok().filter(|s| *s > 0).map(Duration::from_secs),
        namespace: call.route.namespace,
        form: call.form,
    };
    let (lines, mut out) = mpsc::channel(64);
    tokio::spawn(watch::run(Arc::clone(shared), watch, start, fault, lines));
    let stream = futures_util::stream::poll_fn(move |context| {
        out.poll_recv(context).map(|line| line.map(|line| line.map(Frame::data)))
    });
    Ok(response(200, "application/json", StreamBody::new(stream).boxed()))
}

fn success(code: u16, details: Value) -> Value {
    let mut status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success" });
    if code != 0 {
        status["code"] = json!(code);
    }
    if !details.is_null() {
        status["details"] = details;
    }
    status
}

fn other_path(path: &str) -> Response<Body> {
    match path {
        "/readyz" | "/livez" | "/healthz" => answer(200, "text/plain", "ok".into()),
        "/version" => {
            let version =
                json!({ "major": "1", "minor": "33", "gitVersion": "v1.33.0", "platform": "linux/amd64" });
            answer(200, "application/json", version.to_string().into())
        }
        _ => failure(&ApiError::of_code(404)),
    }
}

fn failure(error: &ApiError) -> Response<Body> {
    let mut response = answer(error.code, "application/json", error.status().to_string().into());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

fn answer(code: u16, content_type: &'static str, body: Bytes) -> Response<Body> {
    response(code, content_type, Full::new(body).map_err(|never: Infallible| match never {}).boxed())
}

fn response(code: u16, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = hyper::StatusCode::from_u16(code).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(content_type));
    response
}
