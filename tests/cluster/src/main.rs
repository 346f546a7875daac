//! A control plane that ends with its standard input, on SIGTERM, or when one of its programs ends. It prints the path of a kubeconfig once it takes
//! requests.

use std::error::Error;
use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;

use test_cluster::{ControlPlane, Programs};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let programs: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let Ok([etcd, api_server, manager, scheduler]) = <[PathBuf; 4]>::try_from(programs) else {
        return Err(
            "usage: control-plane ETCD KUBE_APISERVER KUBE_CONTROLLER_MANAGER KUBE_SCHEDULER"
                .into(),
        );
    };
    // Heard from the start: what is started must not outlive this.
    let (mut terminated, mut interrupted) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let mut plane = ControlPlane::start(&Programs {
        etcd,
        api_server,
        controllers: Some([manager, scheduler]),
    })
    .await?;
    let kubeconfig = plane.kubeconfig_file("default")?;
    writeln!(io::stdout(), "{}", kubeconfig.display())?;
    // Nothing is read. The parent holds the other end for as long as it needs the control plane.
    let input_ended = tokio::task::spawn_blocking(|| io::stdin().lock().lines().for_each(drop));
    // Without one of its programs, tests would wait until they time out. They fail at once without all.
    let failure = tokio::select! {
        _ = input_ended => None,
        _ = terminated.recv() => None,
        _ = interrupted.recv() => None,
        failure = plane.ended() => Some(failure),
    };
    drop(plane);
    if let Some(failure) = &failure {
        writeln!(io::stderr(), "error: {failure}")?;
    }
    // The thread that reads the input would be waited for.
    std::process::exit(failure.is_some().into())
}
