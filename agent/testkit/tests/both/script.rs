//! One script of API requests; its transcript shows what clients can rely on, without what differs between two runs.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use http::{Method, Request};
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use nobypass_testkit::wait::HANG;
use serde_json::{Value, json};

pub const MERGE: &str = "application/merge-patch+json";
pub const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub const JSON_PATCH: &str = "application/json-patch+json";
pub const APPLY: &str = "application/apply-patch+yaml";

/// Fields that a transcript shows of an object.
const SHOWN: [&str; 18] = [
    "/metadata/labels",
    "/metadata/annotations",
    "/metadata/finalizers",
    "/metadata/deletionTimestamp",
    "/metadata/deletionGracePeriodSeconds",
    "/metadata/uid",
    "/metadata/resourceVersion",
    "/spec/nodeName",
    "/spec/taints",
    "/spec/finalizers",
    "/spec/terminationGracePeriodSeconds",
    "/status/phase",
    "/status/allowed",
    "/status/disruptionsAllowed",
    "/note",
    "/message",
    "/regarding/name",
    "/involvedObject/name",
];

pub struct Script {
    client: Client,
    /// Names that differ between runs, and what they are called.
    names: Vec<(String, &'static str)>,
    seen: HashMap<String, String>,
    transcript: String,
}

impl Script {
    pub fn new(client: Client, names: Vec<(String, &'static str)>) -> Self {
        Self { client, names, seen: HashMap::new(), transcript: String::new() }
    }

    pub fn transcript(self) -> String {
        self.transcript
    }

    pub fn section(&mut self, title: &str) {
        writeln!(self.transcript, "\n# {title}").unwrap();
    }

    pub fn note(&mut self, text: &str) {
        writeln!(self.transcript, "{text}").unwrap();
    }

    fn request(method: &str, path: &str, content_type: &str, body: &Value) -> Request<Body> {
        let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        Request::builder()
            .method(method.parse::<Method>().unwrap())
            .uri(path)
            .header("content-type", content_type)
            .header("accept", "application/json")
            .body(Body::from(bytes))
            .unwrap()
    }

    pub async fn get(&mut self, title: &str, path: &str) -> Value {
        self.call(title, "GET", path, "application/json", &Value::Null).await
    }

    pub async fn post(&mut self, title: &str, path: &str, body: &Value) -> Value {
        self.call(title, "POST", path, "application/json", body).await
    }

    pub async fn put(&mut self, title: &str, path: &str, body: &Value) -> Value {
        self.call(title, "PUT", path, "application/json", body).await
    }

    pub async fn patch(&mut self, title: &str, path: &str, how: &str, body: &Value) -> Value {
        self.call(title, "PATCH", path, how, body).await
    }

    pub async fn delete(&mut self, title: &str, path: &str, options: &Value) -> Value {
        self.call(title, "DELETE", path, "application/json", options).await
    }

    async fn call(
        &mut self,
        title: &str,
        method: &str,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> Value {
        let sent = self.client.send(Self::request(method, path, content_type, body));
        let response = tokio::time::timeout(HANG, sent).await;
        let response = response.unwrap_or_else(|_| panic!("no answer: {title}")).unwrap();
        let code = response.status().as_u16();
        let retry = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        let bytes = tokio::time::timeout(HANG, response.into_body().collect()).await;
        let bytes = bytes.unwrap_or_else(|_| panic!("no end of the answer: {title}")).unwrap().to_bytes();
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or_else(|_| json!({ "kind": "no JSON" }));
        let retry = retry.map(|seconds| format!(" retry-after={seconds}")).unwrap_or_default();
        let shown = self.show(&answer);
        let line = self.anonymous(&format!("{title}: {code}{retry} {shown}"));
        writeln!(self.transcript, "{line}").unwrap();
        answer
    }

    /// Opens a watch; gives its events until `count` of them have come, or until it ends.
    pub async fn watch(&self, path: &str) -> Events {
        let request = Self::request("GET", path, "application/json", &Value::Null);
        let response =
            tokio::time::timeout(HANG, self.client.send(request)).await.expect("an answer").unwrap();
        Events { code: response.status().as_u16(), body: response.into_body(), rest: String::new() }
    }

    /// Writes down the next `count` events of a watch.
    pub async fn events(&mut self, title: &str, events: &mut Events, count: usize) {
        self.note(&format!("{title}: {}", events.code));
        for _ in 0..count {
            let Some(event) = events.next().await else {
                self.note("  the end");
                return;
            };
            let shown = self.show(&event["object"]);
            let line = self.anonymous(&format!("  {} {shown}", event["type"].as_str().unwrap_or("?")));
            self.note(&line);
        }
    }

    /// What of an answer is the same in each run, and matters.
    fn show(&mut self, answer: &Value) -> String {
        let kind = answer["kind"].as_str().unwrap_or("?").to_owned();
        if kind == "Status" {
            let details = &answer["details"];
            let causes: Vec<&str> = details["causes"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|cause| cause["reason"].as_str())
                .collect();
            let causes = if answer["reason"] == "Invalid" { String::new() } else { format!("{causes:?}") };
            let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
            return format!(
                "Status {} {} code={} kind={} {causes}",
                text(&answer["status"]),
                text(&answer["reason"]),
                answer["code"].as_u64().unwrap_or(0),
                text(&details["kind"]),
            );
        }
        if let Some(items) = answer["items"].as_array() {
            let mut names: Vec<&str> =
                items.iter().map(|item| item["metadata"]["name"].as_str().unwrap_or("?")).collect();
            names.sort_unstable();
            let typed = items.iter().any(|item| item.get("kind").is_some());
            let metadata = &answer["metadata"];
            return format!(
                "{kind} {names:?} items-have-kind={typed} version={} continue={} remaining={}",
                metadata["resourceVersion"].as_str().is_some_and(|version| !version.is_empty()),
                metadata["continue"].as_str().is_some_and(|token| !token.is_empty()),
                metadata["remainingItemCount"]
            );
        }
        if answer["metadata"]["annotations"]["k8s.io/initial-events-end"] == "true" {
            return format!("{kind} end of initial events");
        }
        let name = answer["metadata"]["name"].as_str().unwrap_or_default();
        let name = match answer["metadata"]["generateName"].as_str() {
            Some(prefix) => format!("{prefix}+{}", name.len() - prefix.len()),
            None => name.to_owned(),
        };
        let mut text = format!("{kind} {name}");
        for path in SHOWN {
            let Some(value) = answer.pointer(path).filter(|value| !value.is_null()) else { continue };
            let field = path.rsplit('/').next().unwrap_or_default();
            let value = match field {
                "uid" => self.numbered("uid", value),
                "resourceVersion" => self.numbered("version", value),
                "deletionTimestamp" => "(time)".into(),
                "taints" => value.as_array().unwrap().iter().map(|t| format!("{}", t["key"])).collect(),
                "labels" | "annotations" => {
                    let pairs: BTreeMap<&String, &Value> = value.as_object().unwrap().iter().collect();
                    serde_json::to_string(&pairs).unwrap()
                }
                _ => value.to_string(),
            };
            write!(text, " {field}={value}").unwrap();
        }
        for list in ["/status/conditions", "/spec/containers", "/spec/tolerations"] {
            for item in answer.pointer(list).and_then(Value::as_array).into_iter().flatten() {
                let field = |name: &str| item[name].as_str().unwrap_or_default().to_owned();
                // The server adds these by itself.
                if !field("key").starts_with("node.kubernetes.io/") {
                    write!(
                        text,
                        " ({}{}{} {}{})",
                        field("type"),
                        field("name"),
                        field("key"),
                        field("status"),
                        field("image")
                    )
                    .unwrap();
                }
            }
        }
        text
    }

    /// The same value has the same number in the whole transcript.
    fn numbered(&mut self, what: &str, value: &Value) -> String {
        let next = self.seen.keys().filter(|key| key.starts_with(what)).count() + 1;
        let key = format!("{what} {value}");
        self.seen.entry(key).or_insert_with(|| format!("#{next}")).clone()
    }

    fn anonymous(&self, text: &str) -> String {
        self.names.iter().fold(text.to_owned(), |text, (name, called)| text.replace(name.as_str(), called))
    }
}

/// The events of a watch.
pub struct Events {
    code: u16,
    body: Body,
    rest: String,
}

impl Events {
    /// The next event; `None` at the end.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((line, rest)) = self.rest.split_once('\n') {
                let event = serde_json::from_str(line).expect("a line of JSON");
                self.rest = rest.to_owned();
                return Some(event);
            }
            let frame = tokio::time::timeout(HANG, self.body.frame()).await.expect("an event")?;
            let data = frame.expect("no error").into_data().expect("data");
            self.rest.push_str(std::str::from_utf8(&data).unwrap());
        }
    }
}
