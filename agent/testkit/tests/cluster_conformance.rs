//! A real kube-apiserver answers the script as it did when its transcript was made.

#[path = "both/conformance.rs"]
mod conformance;
#[path = "both/script.rs"]
mod script;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use nobypass_testkit::servers::Server;

#[tokio::test]
async fn a_real_server_answers_as_it_did() {
    let server = Server::real().unwrap();
    let config = Kubeconfig::from_yaml(&server.kubeconfig().unwrap()).unwrap();
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    let given = conformance::Given {
        client: Client::try_from(config).unwrap(),
        namespace: server.namespace("conformance").unwrap(),
        node: Server::unique("conformance-node"),
        compact: Box::new(|| {}),
    };
    let transcript = conformance::run(given).await;
    conformance::compare(&transcript);
}
