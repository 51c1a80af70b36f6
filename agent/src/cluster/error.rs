//! Why a request to the API server failed, and what to do about it.

use std::time::Duration;

use serde::Deserialize;

/// A failed request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Nobody answered, or the connection broke.
    #[error("the API server does not answer: {0}")]
    Unreachable(String),
    /// It said nothing for too long.
    #[error("the API server said nothing for {} s", .0.as_secs())]
    Silent(Duration),
    /// The connection broke before all was said.
    #[error("the connection to the API server broke: {0}")]
    Cut(String),
    /// An answer that cannot be read.
    #[error("an answer of the API server is not understood: {0}")]
    Unreadable(String),
    /// The credentials are not accepted.
    #[error(
        "the API server does not accept the credentials (401): {message}; give the agent's pod a service account token, \
         or --kubeconfig one that has not expired"
    )]
    Unauthorized { message: String },
    /// The credentials do not allow it.
    #[error(
        "the API server forbids the agent to {verb} {resource} (403): {message}; add to its ClusterRole: \
         {{apiGroups: [\"{group}\"], resources: [{resource}], verbs: [list, watch]}}"
    )]
    Forbidden { verb: &'static str, group: &'static str, resource: &'static str, message: String },
    /// Any other refusal.
    #[error("the API server answers {code} {reason}: {message}")]
    Status { code: u16, reason: String, message: String, retry_after: Option<Duration> },
}

impl RequestError {
    /// A label for metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Silent(_) => "silent",
            Self::Cut(_) => "cut",
            Self::Unreadable(_) => "unreadable",
            Self::Unauthorized { .. } => "unauthorized",
            Self::Forbidden { .. } => "forbidden",
            Self::Status { code: 410, .. } => "gone",
            Self::Status { code: 429, .. } => "too_many_requests",
            Self::Status { code: 504, .. } => "timeout",
            Self::Status { code: 500..=599, .. } => "server_error",
            Self::Status { .. } => "refused",
        }
    }

    /// All labels that [`Self::reason`] gives.
    pub const REASONS: [&str; 11] = [
        "unreachable",
        "silent",
        "cut",
        "unreadable",
        "unauthorized",
        "forbidden",
        "gone",
        "too_many_requests",
        "timeout",
        "server_error",
        "refused",
    ];

    /// The server has no history from that resource version on.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Status { code: 410, .. })
    }

    /// How long the server wants to be left alone.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// `Status` of apimachinery, the part that is of use.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Status {
    code: u16,
    reason: String,
    message: String,
    details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    retry_after_seconds: Option<u64>,
}

/// The longest text of the server's that is repeated in a message.
const MESSAGE: usize = 300;

impl Status {
    /// The error of an answer with this HTTP status and body to a request to `verb` the `resource`.
    pub(super) fn read(code: u16, body: &[u8]) -> Self {
        let mut status: Self = serde_json::from_slice(body).unwrap_or_else(|_| Self {
            message: String::from_utf8_lossy(body).trim().chars().take(MESSAGE).collect(),
            ..Self::default()
        });
        status.code = code;
        status
    }

    pub(super) fn into_error(
        self,
        verb: &'static str,
        group: &'static str,
        resource: &'static str,
        header: Option<Duration>,
    ) -> RequestError {
        let Self { code, reason, message, details } = self;
        let message: String = message.chars().take(MESSAGE).collect();
        let asked = details.and_then(|details| details.retry_after_seconds).map(Duration::from_secs);
        match code {
            401 => RequestError::Unauthorized { message },
            403 => RequestError::Forbidden { verb, group, resource, message },
            _ => RequestError::Status { code, reason, message, retry_after: header.or(asked) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u16, body: &str) -> RequestError {
        Status::read(code, body.as_bytes()).into_error("list", "", "pods", None)
    }

    #[test]
    fn refusals_say_what_to_do() {
        let forbidden = error(403, r#"{"kind":"Status","code":403,"reason":"Forbidden","message":"no"}"#);
        assert_eq!(
            forbidden.to_string(),
            "the API server forbids the agent to list pods (403): no; add to its ClusterRole: \
             {apiGroups: [\"\"], resources: [pods], verbs: [list, watch]}"
        );
        assert!(error(401, "").to_string().contains("service account token"));
    }

    #[test]
    fn every_error_has_a_listed_reason() {
        for (code, body, reason) in [
            (401, "", "unauthorized"),
            (403, "no JSON", "forbidden"),
            (410, "{}", "gone"),
            (429, r#"{"details":{"retryAfterSeconds":3}}"#, "too_many_requests"),
            (500, "{", "server_error"),
            (503, "", "server_error"),
            (504, r#"{"reason":"Timeout"}"#, "timeout"),
            (422, r#"{"reason":"Invalid"}"#, "refused"),
        ] {
            let error = error(code, body);
            assert_eq!(error.reason(), reason, "{code}");
            assert!(RequestError::REASONS.contains(&reason));
            assert_eq!(error.is_gone(), code == 410);
            let asked = (code == 429).then(|| Duration::from_secs(3));
            assert_eq!(error.retry_after(), asked);
        }
        for error in [
            RequestError::Unreachable(String::new()),
            RequestError::Silent(Duration::ZERO),
            RequestError::Cut(String::new()),
            RequestError::Unreadable(String::new()),
        ] {
            assert!(RequestError::REASONS.contains(&error.reason()));
        }
    }

    #[test]
    fn what_a_proxy_answers_is_shown_in_short() {
        let long = format!("<html>{}", "x".repeat(10_000));
        assert!(error(502, &long).to_string().len() < 400);
    }
}
