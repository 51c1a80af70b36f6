//! Objects with their history: each change has the next resource version of one counter, as in etcd.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::error::ApiError;
use super::kinds::Kind;

/// Where an object is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub resource: &'static str,
    /// Empty for what is not namespaced.
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(kind: &Kind, namespace: &str, name: &str) -> Self {
        let namespace = if kind.namespaced { namespace } else { "" };
        Self { resource: kind.resource, namespace: namespace.into(), name: name.into() }
    }
}

/// One write.
#[derive(Clone, Debug)]
pub struct Change {
    pub version: u64,
    pub key: Key,
    pub old: Option<Arc<Value>>,
    /// `None`: deleted.
    pub new: Option<Arc<Value>>,
}

#[derive(Debug)]
struct Version {
    version: u64,
    object: Option<Arc<Value>>,
}

#[derive(Debug, Default)]
pub struct Store {
    version: u64,
    compacted: u64,
    objects: BTreeMap<Key, Vec<Version>>,
    log: Vec<Arc<Change>>,
}

impl Store {
    /// The resource version of the newest write.
    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn get(&self, key: &Key) -> Option<Arc<Value>> {
        self.objects.get(key)?.last()?.object.clone()
    }

    /// Writes an object and gives it its resource version. One that is the same as before is not written.
    pub fn put(&mut self, key: &Key, mut object: Value) -> Arc<Value> {
        let old = self.get(key);
        if let Some(old) = &old {
            object["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
            if **old == object {
                return Arc::clone(old);
            }
        }
        object["metadata"]["resourceVersion"] = json!((self.version + 1).to_string());
        let object = Arc::new(object);
        self.commit(key, old, Some(Arc::clone(&object)));
        object
    }

    /// Removes an object; gives what it was, with the resource version of its end.
    pub fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let old = self.get(key)?;
        self.commit(key, Some(Arc::clone(&old)), None);
        Some(Arc::new(at_version(&old, self.version)))
    }

    fn commit(&mut self, key: &Key, old: Option<Arc<Value>>, new: Option<Arc<Value>>) {
        self.version += 1;
        let version = Version { version: self.version, object: new.clone() };
        self.objects.entry(key.clone()).or_default().push(version);
        self.log.push(Arc::new(Change { version: self.version, key: key.clone(), old, new }));
    }

    /// Counts on without a write, as other resources of a real cluster do.
    pub fn skip(&mut self, count: u64) {
        self.version += count;
    }

    /// The objects of a resource as they were at `version`, in the order of their keys.
    pub fn list(
        &self,
        kind: &Kind,
        namespace: Option<&str>,
        version: u64,
    ) -> Result<Vec<(&Key, Arc<Value>)>, ApiError> {
        if version < self.compacted {
            return Err(ApiError::expired(version, self.compacted));
        }
        let first = Key { resource: kind.resource, namespace: String::new(), name: String::new() };
        let of_resource = self.objects.range(first..).take_while(|(key, _)| key.resource == kind.resource);
        let wanted = of_resource.filter(|(key, _)| namespace.is_none_or(|wanted| key.namespace == wanted));
        let at = |(key, versions): (_, &Vec<Version>)| {
            let last = versions.iter().rev().find(|candidate| candidate.version <= version)?;
            Some((key, Arc::clone(last.object.as_ref()?)))
        };
        Ok(wanted.filter_map(at).collect())
    }

    /// The writes after `version`.
    pub fn since(&self, version: u64) -> Result<&[Arc<Change>], ApiError> {
        if version < self.compacted {
            return Err(ApiError::expired(version, self.compacted));
        }
        let start = self.log.partition_point(|change| change.version <= version);
        Ok(self.log.get(start..).unwrap_or_default())
    }

    /// Forgets the history before the newest write.
    pub fn compact(&mut self) {
        self.compacted = self.version;
        self.log.clear();
        for versions in self.objects.values_mut() {
            versions.drain(..versions.len().saturating_sub(1));
        }
        self.objects.retain(|_, versions| versions.last().is_some_and(|last| last.object.is_some()));
    }
}

/// A copy of `object` with another resource version.
pub fn at_version(object: &Value, version: u64) -> Value {
    let mut object = object.clone();
    object["metadata"]["resourceVersion"] = json!(version.to_string());
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(store: &Store, version: u64) -> Vec<String> {
        let kind = Kind::of_resource("pods").expect("pods");
        let list = store.list(kind, None, version).expect("not compacted");
        list.iter()
            .map(|(key, object)| format!("{}@{}", key.name, object["metadata"]["resourceVersion"]))
            .collect()
    }

    #[test]
    fn history_is_kept_until_compaction() {
        let kind = Kind::of_resource("pods").expect("pods");
        let (a, b) = (Key::new(kind, "x", "a"), Key::new(kind, "x", "b"));
        let mut store = Store::default();
        store.put(&a, json!({"metadata": {}}));
        store.put(&b, json!({"metadata": {}}));
        store.put(&a, json!({"metadata": {}, "spec": 1}));
        store.put(&a, json!({"metadata": {}, "spec": 1}));
        assert_eq!(store.version(), 3, "the same again is no write");
        let end = store.remove(&a).expect("is there");
        assert_eq!(end["metadata"]["resourceVersion"], "4");
        assert_eq!(names(&store, 2), [r#"a@"1""#, r#"b@"2""#]);
        assert_eq!(names(&store, 3), [r#"a@"3""#, r#"b@"2""#]);
        assert_eq!(names(&store, 4), [r#"b@"2""#]);
        assert_eq!(store.since(2).expect("there").len(), 2);
        store.compact();
        assert_eq!(names(&store, 4), [r#"b@"2""#]);
        assert_eq!(store.since(3).expect_err("gone").code, 410);
        assert!(store.since(4).expect("there").is_empty());
        assert_eq!(store.list(kind, None, 3).expect_err("gone").code, 410);
    }
}
