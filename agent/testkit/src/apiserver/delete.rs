//! Deletion: graceful for pods, held by finalizers, with preconditions; and eviction.

use std::sync::Arc;

use serde_json::{Value, json};

use super::error::ApiError;
use super::kinds::{Kind, Route};
use super::rules;
use super::select::Selector;
use super::store::{Key, Store};
use super::write::{existing, key_of};

/// Pods that may not be evicted now, as a PodDisruptionBudget with nothing left says.
#[derive(Clone, Debug)]
pub struct Budget {
    pub namespace: String,
    pub selector: Selector,
    /// Seconds that the answer asks to wait, if it says.
    pub retry_after: Option<u64>,
}

/// `DeleteOptions`, as far as they matter.
#[derive(Clone, Debug, Default)]
pub struct Options {
    grace: Option<i64>,
    uid: Option<String>,
    version: Option<String>,
    pub dry_run: bool,
}

impl Options {
    pub fn read(body: &Value) -> Self {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let preconditions = &body["preconditions"];
        Self {
            grace: body["gracePeriodSeconds"].as_i64(),
            uid: text(&preconditions["uid"]),
            version: text(&preconditions["resourceVersion"]),
            dry_run: body["dryRun"].as_array().is_some_and(|runs| !runs.is_empty()),
        }
    }

    pub fn with_grace(mut self, seconds: Option<i64>) -> Self {
        self.grace = seconds.or(self.grace);
        self
    }

    fn check(&self, kind: &Kind, object: &Value) -> Result<(), ApiError> {
        let metadata = &object["metadata"];
        for (what, wanted, field) in
            [("UID", &self.uid, "uid"), ("ResourceVersion", &self.version, "resourceVersion")]
        {
            let is = metadata[field].as_str().unwrap_or_default();
            if let Some(wanted) = wanted
                && wanted != is
            {
                let why = format!(
                    "Precondition failed: {what} in precondition: {wanted}, {what} in object meta: {is}"
                );
                let name = metadata["name"].as_str().unwrap_or_default();
                return Err(ApiError::conflict_because(kind, name, kind.kind, &why));
            }
        }
        Ok(())
    }
}

/// What is left of the object.
#[derive(Debug)]
pub enum Deleted {
    Gone(Arc<Value>),
    /// It has a `deletionTimestamp` and waits for its kubelet or its finalizers.
    Terminating(Arc<Value>),
}

/// DELETE of one object.
pub fn delete(store: &mut Store, route: &Route, options: &Options) -> Result<Deleted, ApiError> {
    let key = key_of(route)?;
    let old = existing(store, route.kind, &key)?;
    options.check(route.kind, &old)?;
    Ok(delete_object(store, &key, &old, options))
}

fn delete_object(store: &mut Store, key: &Key, old: &Arc<Value>, options: &Options) -> Deleted {
    let Some(new) = terminating(key.resource, old, options.grace) else {
        return Deleted::Terminating(Arc::clone(old));
    };
    let goes = rules::may_go(&new);
    if options.dry_run {
        let new = Arc::new(new);
        return if goes { Deleted::Gone(new) } else { Deleted::Terminating(new) };
    }
    if goes {
        if key.resource == "pods" && **old != new {
            // Where deletion can be graceful the end of the grace is a write of its own.
            store.put(key, new);
        }
        return Deleted::Gone(store.remove(key).unwrap_or_else(|| Arc::clone(old)));
    }
    Deleted::Terminating(store.put(key, new))
}

/// The object with its time of deletion; `None` if it has a sooner one already.
fn terminating(resource: &str, old: &Value, asked: Option<i64>) -> Option<Value> {
    let mut new = old.clone();
    let running = old["metadata"]["deletionTimestamp"].is_string();
    let grace = if resource == "pods" { pod_grace(old, asked) } else { 0 };
    if running {
        // Only a shorter period changes it.
        let left = old["metadata"]["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
        asked.filter(|seconds| *seconds < left)?;
    }
    new["metadata"]["deletionTimestamp"] = json!(rules::in_seconds(grace));
    new["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
    if resource == "namespaces" {
        new["status"]["phase"] = json!("Terminating");
    }
    Some(new)
}

/// `podStrategy.CheckGracefulDelete`: nobody waits for a pod that no kubelet has or that has ended.
fn pod_grace(pod: &Value, asked: Option<i64>) -> i64 {
    let scheduled = pod["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
    if !scheduled || matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return 0;
    }
    let seconds = asked.or_else(|| pod["spec"]["terminationGracePeriodSeconds"].as_i64()).unwrap_or(30);
    if seconds < 0 { 1 } else { seconds }
}

/// POST of `pods/eviction`.
pub fn evict(store: &mut Store, route: &Route, body: &Value, budgets: &[Budget]) -> Result<(), ApiError> {
    let key = key_of(route)?;
    if body["metadata"]["name"].as_str().is_some_and(|name| name != key.name) {
        return Err(ApiError::bad_request("name in URL does not match name in Eviction object"));
    }
    let old = existing(store, route.kind, &key)?;
    let options = Options::read(&body["deleteOptions"]);
    options.check(route.kind, &old)?;
    let ends = old["metadata"]["deletionTimestamp"].is_string();
    let runs = !matches!(old["status"]["phase"].as_str(), Some("Pending" | "Succeeded" | "Failed"));
    if runs && !ends {
        let blocks = |budget: &&Budget| budget.namespace == key.namespace && budget.selector.matches(&old);
        if let Some(budget) = budgets.iter().find(blocks) {
            return Err(disrupts(budget.retry_after));
        }
        take_from_budget(store, &key, &old)?;
    }
    let mut target = (*old).clone();
    let why = "Eviction API: evicting";
    let condition = json!({
        "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": why,
    });
    rules::set_condition(&mut target, condition);
    let old = store.put(&key, target);
    delete_object(store, &key, &old, &options);
    Ok(())
}

/// The refusal of a budget.
fn disrupts(retry_after: Option<u64>) -> ApiError {
    let message = "Cannot evict pod as it would violate the pod's disruption budget.";
    let mut error = ApiError::new(429, "TooManyRequests", message);
    *error.details = json!({ "causes": [{ "reason": "DisruptionBudget" }] });
    error.retry_after = retry_after;
    error
}

/// Takes one disruption from the pod's PodDisruptionBudget, if it has one (`EvictionREST.checkAndDecrement`).
fn take_from_budget(store: &mut Store, key: &Key, pod: &Value) -> Result<(), ApiError> {
    let Some(kind) = Kind::of_resource("poddisruptionbudgets") else { return Ok(()) };
    let selects = |budget: &Value| {
        let labels = budget["spec"]["selector"]["matchLabels"].as_object();
        labels.is_some_and(|labels| labels.iter().all(|(k, v)| pod["metadata"]["labels"].get(k) == Some(v)))
    };
    let list = store.list(kind, Some(&key.namespace), store.version())?;
    let mut budgets = list.into_iter().filter(|(_, budget)| selects(budget));
    let Some((budget_key, budget)) = budgets.next() else { return Ok(()) };
    if budgets.next().is_some() {
        let message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        return Err(ApiError::new(500, "InternalError", message));
    }
    let status = &budget["status"];
    if status["observedGeneration"].as_i64().unwrap_or(0)
        < budget["metadata"]["generation"].as_i64().unwrap_or(1)
    {
        return Err(disrupts(Some(10)));
    }
    let allowed = status["disruptionsAllowed"].as_i64().unwrap_or(0);
    if allowed <= 0 {
        return Err(disrupts(None));
    }
    let (budget_key, mut budget) = (budget_key.clone(), (*budget).clone());
    drop(budgets);
    budget["status"]["disruptionsAllowed"] = json!(allowed - 1);
    budget["status"]["disruptedPods"][&key.name] = json!(rules::now());
    if allowed == 1 {
        let condition =
            json!({ "type": "DisruptionAllowed", "status": "False", "reason": "InsufficientPods" });
        rules::set_condition(&mut budget, condition);
    }
    store.put(&budget_key, budget);
    Ok(())
}
