//! A real kube-apiserver answers the script as it did when its transcript was made.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

#[path = "both/conformance.rs"]
mod conformance;
#[path = "both/script.rs"]
mod script;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use nobypass_testkit::apiserver;
use nobypass_testkit::control_plane::ControlPlane;
use std::sync::Arc;

#[tokio::test]
async fn a_real_server_answers_as_it_did() {
    // One of its own, because it is restarted.
    let plane = Arc::new(ControlPlane::start().unwrap());
    plane.create("/api/v1/namespaces", &apiserver::namespace("conformance")).unwrap();
    let config = Kubeconfig::from_yaml(&plane.admin_kubeconfig().unwrap()).unwrap();
    let mut config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    config.default_retry = false;
    let given = conformance::Given {
        client: Client::try_from(config).unwrap(),
        namespace: "conformance".into(),
        node: "script-node".into(),
        // Its cache begins anew.
        forget: Box::new({
            let plane = Arc::clone(&plane);
            move || plane.restart_apiserver().unwrap()
        }),
    };
    let transcript = conformance::run(given).await;
    conformance::compare(&transcript);
}
