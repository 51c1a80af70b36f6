//! What every test of the API relies on, against the server that the target gives.

use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use nobypass_testkit::servers::Server;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};

async fn client(server: &Server) -> Client {
    let config = Kubeconfig::from_yaml(&server.kubeconfig().unwrap()).unwrap();
    let mut config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

#[tokio::test]
async fn namespaces_and_nodes_are_of_one_test_alone() {
    let server = crate::server();
    let client = client(&server).await;
    let (one, two) = (server.namespace("alone").unwrap(), server.namespace("alone").unwrap());
    assert_ne!(one, two);
    for name in [&one, &two] {
        let found = Api::<Namespace>::all(client.clone()).get(name).await.unwrap();
        assert_eq!(found.status.unwrap().phase.as_deref(), Some("Active"));
        let pods = Api::<Pod>::namespaced(client.clone(), name).list(&ListParams::default()).await.unwrap();
        assert!(pods.items.is_empty());
    }
    let node = server.node("alone").unwrap();
    assert!(Api::<Node>::all(client).get(&node).await.is_ok());
}
