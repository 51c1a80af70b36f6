//! Errors as the API server words them: a `Status` object.

use serde_json::{Value, json};

use super::kinds::Kind;

/// An answer other than success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub code: u16,
    /// `reason` of the `Status`, as `NotFound`.
    pub reason: &'static str,
    pub message: String,
    /// `details` of the `Status`.
    pub details: Box<Value>,
    /// Seconds of the `Retry-After` header.
    pub retry_after: Option<u64>,
}

impl ApiError {
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Box::default(), retry_after: None }
    }

    fn of_object(code: u16, reason: &'static str, kind: &Kind, name: &str, what: &str) -> Self {
        let mut error =
            Self::new(code, reason, what.replace("{}", &format!("{} \"{name}\"", kind.qualified())));
        *error.details = json!({ "name": name, "group": kind.group, "kind": kind.resource });
        error
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub fn invalid(kind: &Kind, name: &str, what: &str) -> Self {
        let mut error = Self::new(422, "Invalid", format!("{} \"{name}\" is invalid: {what}", kind.kind));
        *error.details = json!({ "name": name, "group": kind.group, "kind": kind.kind });
        error
    }

    pub fn not_found(kind: &Kind, name: &str) -> Self {
        Self::of_object(404, "NotFound", kind, name, "{} not found")
    }

    pub fn already_exists(kind: &Kind, name: &str) -> Self {
        Self::of_object(409, "AlreadyExists", kind, name, "{} already exists")
    }

    /// Optimistic concurrency.
    pub fn conflict(kind: &Kind, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict_because(kind, name, kind.resource, why)
    }

    /// A conflict that says `why`, about what it calls `of`.
    pub fn conflict_because(kind: &Kind, name: &str, of: &str, why: &str) -> Self {
        let what = format!("Operation cannot be fulfilled on {{}}: {why}");
        let mut error = Self::of_object(409, "Conflict", kind, name, &what);
        error.details["kind"] = json!(of);
        error
    }

    /// Options that do not go together.
    pub fn invalid_options(of: &str, what: &str) -> Self {
        let mut error = Self::new(422, "Invalid", format!("{of}.meta.k8s.io \"\" is invalid: {what}"));
        *error.details = json!({ "group": "meta.k8s.io", "kind": of });
        error
    }

    pub fn forbidden(kind: &Kind, name: &str, why: &str) -> Self {
        Self::of_object(403, "Forbidden", kind, name, &format!("{{}} is forbidden: {why}"))
    }

    /// A resource version that has been compacted, in a list or a watch.
    pub fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// A resource version that does not exist yet: the one case in which a healthy server answers 504.
    pub fn too_large(asked: u64, current: u64) -> Self {
        let message = format!("Too large resource version: {asked}, current: {current}");
        let mut error = Self::new(504, "Timeout", message);
        let cause = json!({ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" });
        *error.details = json!({ "causes": [cause], "retryAfterSeconds": 1 });
        error.retry_after = Some(1);
        error
    }

    /// What a fault answers with.
    pub fn of_code(code: u16) -> Self {
        let (reason, message) = match code {
            401 => ("Unauthorized", "Unauthorized"),
            403 => ("Forbidden", "forbidden by the test"),
            404 => ("NotFound", "the server could not find the requested resource"),
            409 => ("Conflict", "Operation cannot be fulfilled: conflict made by the test"),
            410 => ("Expired", "The provided resource version is too old."),
            429 => {
                ("TooManyRequests", "The apiserver is shutting down or overloaded, please try again later.")
            }
            503 => ("ServiceUnavailable", "the server is currently unable to handle the request"),
            504 => ("Timeout", "Timeout: request did not complete within the requested timeout"),
            _ => ("InternalError", "Internal error occurred: made by the test"),
        };
        Self::new(code, reason, message)
    }

    /// The `Status` object.
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if !self.details.is_null() {
            status["details"] = (*self.details).clone();
        }
        if let Some(seconds) = self.retry_after {
            status["details"]["retryAfterSeconds"] = json!(seconds);
        }
        status
    }
}
