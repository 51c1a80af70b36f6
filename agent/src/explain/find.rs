//! Finding a pod by what a person wrote.

use crate::policy::check::nearest;

/// A pod's name and its cgroup id.
pub type Named = (String, String, u64);

/// Why a pod is not found.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// No pod has this name.
    #[error("no pod {wanted} on this node{}", hint(near))]
    Nobody {
        /// What was asked for.
        wanted: String,
        /// Names that are near.
        near: Vec<String>,
    },
    /// Several have it.
    #[error("several pods are called {wanted}: {}", all.join(", "))]
    Several {
        /// What was asked for.
        wanted: String,
        /// Their full names.
        all: Vec<String>,
    },
}

fn hint(near: &[String]) -> String {
    match near {
        [] => "; `nobypass status --all` lists them".into(),
        near => format!("; did you mean {}?", near.join(" or ")),
    }
}

/// The cgroup id of the pod that `wanted` names: `namespace/name`, or `name` alone where one pod has it.
///
/// # Errors
/// [`NotFound`], with what may have been meant.
pub fn find(wanted: &str, pods: &[Named]) -> Result<u64, NotFound> {
    let (namespace, name) = match wanted.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, wanted),
    };
    let full = |(namespace, name, _): &Named| format!("{namespace}/{name}");
    let fits = |pod: &&Named| pod.1 == name && namespace.is_none_or(|namespace| pod.0 == namespace);
    let found: Vec<&Named> = pods.iter().filter(fits).collect();
    match found.as_slice() {
        [pod] => Ok(pod.2),
        [] => {
            let known: Vec<String> = pods.iter().filter(|pod| !pod.1.is_empty()).map(full).collect();
            let names: Vec<&str> = known.iter().map(String::as_str).collect();
            // The name in another namespace is nearer than any other.
            let mut near: Vec<String> = pods.iter().filter(|pod| pod.1 == name).map(full).collect();
            if near.is_empty() {
                let starts = |known: &&String| {
                    !name.is_empty() && known.split('/').nth(1).is_some_and(|of| of.starts_with(name))
                };
                near = known.iter().filter(starts).take(3).cloned().collect();
            }
            if near.is_empty() {
                let bare: Vec<&str> = pods.iter().map(|pod| pod.1.as_str()).collect();
                let best = match namespace {
                    Some(_) => nearest(wanted, &names),
                    None => nearest(name, &bare),
                };
                near.extend(best.map(str::to_owned));
            }
            Err(NotFound::Nobody { wanted: wanted.into(), near })
        }
        several => Err(NotFound::Several {
            wanted: wanted.into(),
            all: several.iter().map(|pod| full(pod)).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_found_by_its_name_and_near_names_are_told() {
        let pods: Vec<Named> =
            [("shop", "cart-0", 1), ("shop", "web-5d8f-x2x", 2), ("lab", "cart-0", 3), ("", "", 4)]
                .map(|(namespace, name, id)| (namespace.to_owned(), name.to_owned(), id))
                .into();
        assert_eq!(find("shop/cart-0", &pods), Ok(1));
        assert_eq!(find("web-5d8f-x2x", &pods), Ok(2));
        let says = |wanted: &str| find(wanted, &pods).unwrap_err().to_string();
        assert_eq!(says("cart-0"), "several pods are called cart-0: shop/cart-0, lab/cart-0");
        assert_eq!(
            says("prod/web-5d8f-x2x"),
            "no pod prod/web-5d8f-x2x on this node; did you mean shop/web-5d8f-x2x?"
        );
        assert_eq!(says("shop/web"), "no pod shop/web on this node; did you mean shop/web-5d8f-x2x?");
        assert_eq!(says("shop/card-0"), "no pod shop/card-0 on this node; did you mean shop/cart-0?");
        assert_eq!(says("zzz"), "no pod zzz on this node; `nobypass status --all` lists them");
        assert_eq!(find("", &[]), Err(NotFound::Nobody { wanted: String::new(), near: Vec::new() }));
    }
}
