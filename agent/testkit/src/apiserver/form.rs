//! How a stored object looks to who asks: core events, and metadata alone.

use serde_json::{Map, Value, json};

use super::kinds::{EVENTS, Route};

/// Names of an event's fields in events.k8s.io/v1, as which it is stored, and in the core group.
const EVENT_FIELDS: [(&str, &str); 7] = [
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
    ("deprecatedSource", "source"),
    ("reportingController", "reportingComponent"),
];

/// The form that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    core_event: bool,
    /// Metadata alone, as `Accept: application/json;as=PartialObjectMetadata...` asks.
    partial: bool,
    api_version: String,
    kind: &'static str,
}

impl Form {
    pub fn of(route: &Route, accept: &str) -> Self {
        Self {
            core_event: route.kind.resource == EVENTS && route.group.is_empty(),
            partial: accept.contains("as=PartialObjectMetadata"),
            api_version: route.api_version(),
            kind: route.kind.kind,
        }
    }

    /// The object with its `apiVersion` and `kind`.
    pub fn show(&self, stored: &Value) -> Value {
        if self.partial {
            return json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": stored["metadata"],
            });
        }
        let mut object = stored.clone();
        if self.core_event {
            rename(&mut object, |(stored, core)| (stored, core));
        }
        object["apiVersion"] = json!(self.api_version);
        object["kind"] = json!(self.kind);
        object
    }

    /// An item of a list, which does not repeat `apiVersion` and `kind`.
    pub fn item(&self, stored: &Value) -> Value {
        let mut object = self.show(stored);
        if let (false, Value::Object(fields)) = (self.partial, &mut object) {
            fields.shift_remove("apiVersion");
            fields.shift_remove("kind");
        }
        object
    }

    pub fn list(&self, items: &[Value], metadata: &Value) -> Value {
        let (kind, api_version) = match self.partial {
            true => ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1"),
            false => (format!("{}List", self.kind), self.api_version.as_str()),
        };
        json!({ "kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items })
    }

    /// What a bookmark carries: an object with nothing but a resource version.
    pub fn bookmark(&self, version: u64, initial_events_end: bool) -> Value {
        let mut metadata = json!({ "resourceVersion": version.to_string(), "creationTimestamp": null });
        if initial_events_end {
            metadata["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        self.show(&json!({ "metadata": metadata }))
    }

    /// The other way: what is to be stored of what was sent.
    pub fn read(&self, mut sent: Value) -> Value {
        if self.core_event {
            rename(&mut sent, |(stored, core)| (core, stored));
        }
        sent
    }
}

fn rename(
    event: &mut Value,
    direction: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
) {
    let Value::Object(fields) = event else { return };
    let renamed: Map<String, Value> = std::mem::take(fields)
        .into_iter()
        .map(|(name, value)| {
            let pair = EVENT_FIELDS.into_iter().map(&direction).find(|(from, _)| *from == name);
            (pair.map_or(name, |(_, to)| to.to_owned()), value)
        })
        .collect();
    *fields = renamed;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_two_forms() {
        let form = |path: &str, accept: &str| Form::of(&Route::parse(path).expect(path), accept);
        let core = form("/api/v1/namespaces/a/events", "");
        let sent = json!({ "metadata": { "name": "e" }, "involvedObject": { "name": "p" }, "message": "m", "count": 2 });
        let stored = core.read(sent.clone());
        assert_eq!(stored["note"], "m");
        let new = form("/apis/events.k8s.io/v1/events", "").show(&stored);
        assert_eq!((&new["regarding"]["name"], &new["deprecatedCount"]), (&json!("p"), &json!(2)));
        assert_eq!(new["apiVersion"], "events.k8s.io/v1");
        assert_eq!(core.item(&stored), sent);
    }

    #[test]
    fn metadata_alone() {
        let accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        let form = Form::of(&Route::parse("/api/v1/pods").expect("pods"), accept);
        let shown = form.show(&json!({ "metadata": { "name": "p" }, "spec": {} }));
        assert_eq!(
            shown,
            json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": { "name": "p" } })
        );
    }
}
