//! The real control plane as tests meet it: who may what, and that nothing of it is left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

#[path = "both/servers.rs"]
mod servers;

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Error};
use nobypass_testkit::control_plane::ControlPlane;
use nobypass_testkit::servers::Server;
use nobypass_testkit::wait::{HANG, until_async};
use serde_json::{Value, json};

fn server() -> Server {
    Server::real().unwrap()
}

async fn client(kubeconfig: &str) -> Client {
    let config = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

fn of<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// 200, or the code of the refusal.
async fn list(client: &Client, namespace: &str) -> u16 {
    match Api::<Pod>::namespaced(client.clone(), namespace).list(&ListParams::default()).await {
        Ok(_) => 200,
        Err(Error::Api(status)) => status.code,
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn a_service_account_may_what_its_role_says() {
    let plane = ControlPlane::shared().unwrap();
    let namespace = Server::Real(plane).namespace("roles").unwrap();
    let account = client(&plane.service_account_kubeconfig(&namespace, "agent").unwrap()).await;
    let user = client(&plane.user_kubeconfig("someone", None).unwrap()).await;
    let admin = client(&plane.admin_kubeconfig().unwrap()).await;
    assert_eq!([list(&account, &namespace).await, list(&user, &namespace).await], [403, 403]);
    let role: Role = of(json!({
        "metadata": { "name": "reader" },
        "rules": [{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] }],
    }));
    let binding: RoleBinding = of(json!({
        "metadata": { "name": "reader" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader" },
        "subjects": [{ "kind": "ServiceAccount", "namespace": namespace, "name": "agent" }],
    }));
    Api::namespaced(admin.clone(), &namespace).create(&PostParams::default(), &role).await.unwrap();
    Api::namespaced(admin, &namespace).create(&PostParams::default(), &binding).await.unwrap();
    // The authorizer learns of it by a watch.
    let learnt = async {
        while list(&account, &namespace).await != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(HANG, learnt).await.expect("the account may list");
    assert_eq!(list(&user, &namespace).await, 403);
}

#[tokio::test]
async fn a_control_plane_that_is_dropped_leaves_nothing() {
    let plane = ControlPlane::start().unwrap();
    let (dir, pids) = (plane.dir().to_owned(), plane.pids());
    assert!(dir.join("etcd").is_dir());
    tokio::task::spawn_blocking(|| drop(plane)).await.unwrap();
    assert!(!dir.exists());
    let gone = || pids.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists());
    until_async("the end of both processes", HANG, || gone().then_some(())).await.unwrap();
}
