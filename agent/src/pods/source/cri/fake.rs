//! A container runtime for tests: answers what it is told, fails and hangs on demand.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    thread::JoinHandle,
};

use k8s_cri::v1::{
    runtime_service_server::{RuntimeService, RuntimeServiceServer},
    *,
};
use serde_json::json;
use tokio::sync::oneshot;
use tonic::{
    Request, Response, Status,
    codegen::tokio_stream::{Stream, wrappers::UnixListenerStream},
    transport::Server,
};

/// What the runtime has and how it behaves.
#[derive(Debug, Default)]
pub(super) struct Node {
    sandboxes: BTreeMap<String, PodSandbox>,
    containers: BTreeMap<String, Container>,
    exit_codes: HashMap<String, i32>,
    /// Calls that never return; `Call id` for one thing, `Call` for all.
    pub(super) hanging: HashSet<String>,
    /// Calls that fail, likewise.
    pub(super) failing: HashSet<String>,
    /// How often each call came.
    pub(super) calls: HashMap<&'static str, usize>,
    /// CRI-O's form of details.
    pub(super) crio: bool,
    /// Network mode of sandboxes.
    pub(super) host_network: HashSet<String>,
}

pub(super) fn id(n: usize) -> String {
    format!("{n:064x}")
}

pub(super) fn uid(n: usize) -> String {
    format!("00000000-0000-4000-8000-{n:012x}")
}

impl Node {
    /// Adds a ready sandbox of pod `pod`, made at time `sandbox`.
    pub(super) fn add_sandbox(&mut self, sandbox: usize, pod: usize) {
        let metadata = PodSandboxMetadata {
            name: format!("pod-{pod}"),
            uid: uid(pod),
            namespace: "ns".into(),
            attempt: 0,
        };
        let listed = PodSandbox {
            id: id(sandbox),
            metadata: Some(metadata),
            state: PodSandboxState::SandboxReady as i32,
            created_at: i64::try_from(sandbox).expect("small"),
            labels: [("app".into(), "web".into()), ("linkerd.io/control-plane-ns".into(), "linkerd".into())]
                .into(),
            annotations: [
                ("linkerd.io/proxy-version".into(), "v1".into()),
                ("noise".into(), "x".repeat(100)),
            ]
            .into(),
            runtime_handler: String::new(),
        };
        self.sandboxes.insert(listed.id.clone(), listed);
    }

    /// Adds a running container called `name` to `sandbox`.
    pub(super) fn add_container(&mut self, container: usize, sandbox: usize, name: &str) {
        let listed = Container {
            id: id(container),
            pod_sandbox_id: id(sandbox),
            metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
            state: ContainerState::ContainerRunning as i32,
            created_at: i64::try_from(container).expect("small"),
            ..Default::default()
        };
        self.containers.insert(listed.id.clone(), listed);
    }

    pub(super) fn end_container(&mut self, container: usize, exit_code: i32) {
        self.exit_codes.insert(id(container), exit_code);
        self.containers.get_mut(&id(container)).expect("exists").state =
            ContainerState::ContainerExited as i32;
    }

    pub(super) fn stop_sandbox(&mut self, sandbox: usize) {
        self.sandboxes.get_mut(&id(sandbox)).expect("exists").state = PodSandboxState::SandboxNotready as i32;
    }

    pub(super) fn remove_sandbox(&mut self, sandbox: usize) {
        self.sandboxes.remove(&id(sandbox));
        self.containers.retain(|_, container| container.pod_sandbox_id != id(sandbox));
    }

    pub(super) fn set_uid(&mut self, sandbox: usize, uid: &str) {
        let metadata = self.sandboxes.get_mut(&id(sandbox)).expect("exists").metadata.as_mut();
        metadata.expect("metadata").uid = uid.into();
    }

    fn info(&self, pid: usize, linux: &serde_json::Value) -> HashMap<String, String> {
        let spec = json!({
            "process": {"user": {"uid": 2102, "gid": 2102}}, "linux": linux,
            "annotations": {"io.kubernetes.cri-o.CgroupParent": "kubepods.slice"},
        });
        let info = if self.crio {
            json!({"runtimeSpec": spec})
        } else {
            json!({
                "pid": pid, "runtimeType": "io.containerd.runc.v2", "runtimeSpec": spec,
                "config": {"linux": {"cgroup_parent": "/kubepods/pod"}},
            })
        };
        [("info".to_owned(), info.to_string())].into()
    }
}

/// The service; clones share the node.
#[derive(Debug, Clone, Default)]
struct Service(Arc<Mutex<Node>>);

impl Service {
    /// Counts a call, and hangs or fails if it is told to.
    async fn enter(&self, call: &'static str, id: &str) -> Result<(), Status> {
        let named = |set: &HashSet<String>| set.contains(call) || set.contains(&format!("{call} {id}"));
        let (hang, fail) = {
            let mut node = self.0.lock().expect("lock");
            *node.calls.entry(call).or_default() += 1;
            (named(&node.hanging), named(&node.failing))
        };
        if hang {
            std::future::pending::<()>().await;
        }
        if fail { Err(Status::internal("told to fail")) } else { Ok(()) }
    }

    fn node(&self) -> MutexGuard<'_, Node> {
        self.0.lock().expect("lock")
    }
}

type Answer<T> = Result<Response<T>, Status>;

macro_rules! refuse {
    ($($name:ident($request:ty) -> $answer:ty;)*) => {
        // What the attribute makes of an `async fn`, which it does not see in here.
        $(fn $name<'life0, 'async_trait>(
            &'life0 self,
            _: Request<$request>,
        ) -> Pin<Box<dyn Future<Output = Answer<$answer>> + Send + 'async_trait>>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(async { Err(Status::unimplemented(stringify!($name))) })
        })*
    };
}

#[tonic::async_trait]
impl RuntimeService for Service {
    type GetContainerEventsStream =
        Pin<Box<dyn Stream<Item = Result<ContainerEventResponse, Status>> + Send>>;

    async fn version(&self, _: Request<VersionRequest>) -> Answer<VersionResponse> {
        self.enter("Version", "").await?;
        Ok(Response::new(VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "fake".into(),
            runtime_version: "1.0".into(),
            runtime_api_version: "v1".into(),
        }))
    }

    async fn list_pod_sandbox(&self, _: Request<ListPodSandboxRequest>) -> Answer<ListPodSandboxResponse> {
        self.enter("ListPodSandbox", "").await?;
        Ok(Response::new(ListPodSandboxResponse { items: self.node().sandboxes.values().cloned().collect() }))
    }

    async fn list_containers(&self, _: Request<ListContainersRequest>) -> Answer<ListContainersResponse> {
        self.enter("ListContainers", "").await?;
        let containers = self.node().containers.values().cloned().collect();
        Ok(Response::new(ListContainersResponse { containers }))
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<PodSandboxStatusRequest>,
    ) -> Answer<PodSandboxStatusResponse> {
        let id = request.into_inner().pod_sandbox_id;
        self.enter("PodSandboxStatus", &id).await?;
        let node = self.node();
        let sandbox = node.sandboxes.get(&id).ok_or_else(|| Status::not_found("no such sandbox"))?;
        let host = node.host_network.contains(&id);
        let network = if host { NamespaceMode::Node } else { NamespaceMode::Pod } as i32;
        let options = NamespaceOption { network, ..Default::default() };
        let linux = LinuxPodSandboxStatus { namespaces: Some(Namespace { options: Some(options) }) };
        let netns = json!({"namespaces": [{"type": "network", "path": "/var/run/netns/x"}]});
        Ok(Response::new(PodSandboxStatusResponse {
            status: Some(PodSandboxStatus {
                id,
                metadata: sandbox.metadata.clone(),
                state: sandbox.state,
                created_at: sandbox.created_at,
                linux: Some(linux),
                ..Default::default()
            }),
            info: node.info(7, if host { &serde_json::Value::Null } else { &netns }),
            ..Default::default()
        }))
    }

    async fn container_status(
        &self,
        request: Request<ContainerStatusRequest>,
    ) -> Answer<ContainerStatusResponse> {
        let ContainerStatusRequest { container_id: id, verbose } = request.into_inner();
        self.enter("ContainerStatus", &id).await?;
        let node = self.node();
        let container = node.containers.get(&id).ok_or_else(|| Status::not_found("no such container"))?;
        let info = if verbose {
            node.info(8, &json!({"cgroupsPath": format!("/kubepods/{id}")}))
        } else {
            HashMap::new()
        };
        Ok(Response::new(ContainerStatusResponse {
            status: Some(ContainerStatus {
                state: container.state,
                exit_code: node.exit_codes.get(&id).copied().unwrap_or_default(),
                id,
                ..Default::default()
            }),
            info,
        }))
    }

    async fn get_container_events(
        &self,
        _: Request<GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        Err(Status::unimplemented("events"))
    }

    refuse! {
        run_pod_sandbox(RunPodSandboxRequest) -> RunPodSandboxResponse;
        stop_pod_sandbox(StopPodSandboxRequest) -> StopPodSandboxResponse;
        remove_pod_sandbox(RemovePodSandboxRequest) -> RemovePodSandboxResponse;
        create_container(CreateContainerRequest) -> CreateContainerResponse;
        start_container(StartContainerRequest) -> StartContainerResponse;
        stop_container(StopContainerRequest) -> StopContainerResponse;
        remove_container(RemoveContainerRequest) -> RemoveContainerResponse;
        update_container_resources(UpdateContainerResourcesRequest) -> UpdateContainerResourcesResponse;
        reopen_container_log(ReopenContainerLogRequest) -> ReopenContainerLogResponse;
        exec_sync(ExecSyncRequest) -> ExecSyncResponse;
        exec(ExecRequest) -> ExecResponse;
        attach(AttachRequest) -> AttachResponse;
        port_forward(PortForwardRequest) -> PortForwardResponse;
        container_stats(ContainerStatsRequest) -> ContainerStatsResponse;
        list_container_stats(ListContainerStatsRequest) -> ListContainerStatsResponse;
        pod_sandbox_stats(PodSandboxStatsRequest) -> PodSandboxStatsResponse;
        list_pod_sandbox_stats(ListPodSandboxStatsRequest) -> ListPodSandboxStatsResponse;
        update_runtime_config(UpdateRuntimeConfigRequest) -> UpdateRuntimeConfigResponse;
        status(StatusRequest) -> StatusResponse;
        checkpoint_container(CheckpointContainerRequest) -> CheckpointContainerResponse;
        list_metric_descriptors(ListMetricDescriptorsRequest) -> ListMetricDescriptorsResponse;
        list_pod_sandbox_metrics(ListPodSandboxMetricsRequest) -> ListPodSandboxMetricsResponse;
        runtime_config(RuntimeConfigRequest) -> RuntimeConfigResponse;
    }
}

/// The runtime behind its socket. Dropping it is a crash: all connections break, the socket stays.
#[derive(Debug)]
pub(super) struct Fake {
    service: Service,
    socket: PathBuf,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Fake {
    pub(super) fn start(socket: &Path) -> Self {
        let mut fake = Self { service: Service::default(), socket: socket.to_owned(), running: None };
        fake.restart();
        fake
    }

    /// Starts again with the same pods, as a restarted runtime recovers them.
    pub(super) fn restart(&mut self) {
        self.crash();
        let _ = std::fs::remove_file(&self.socket);
        let listener = std::os::unix::net::UnixListener::bind(&self.socket).expect("bind");
        listener.set_nonblocking(true).expect("nonblocking");
        let (stop, stopped) = oneshot::channel();
        let service = self.service.clone();
        // A runtime of its own, whose end ends every task of it.
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(async move {
                let listener = tokio::net::UnixListener::from_std(listener).expect("listener");
                let server = Server::builder().add_service(RuntimeServiceServer::new(service));
                tokio::select! {
                    served = server.serve_with_incoming(UnixListenerStream::new(listener)) => served.expect("served"),
                    _ = stopped => {}
                }
            });
        });
        self.running = Some((stop, thread));
    }

    pub(super) fn crash(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            thread.join().expect("fake runtime");
        }
    }

    pub(super) fn node(&self) -> MutexGuard<'_, Node> {
        self.service.0.lock().expect("lock")
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.crash();
    }
}
