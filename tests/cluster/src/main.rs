//! A control plane that ends with its standard input, or when it is told to. It prints the path of a kubeconfig once it takes
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
    let plane = ControlPlane::start(&Programs {
        etcd,
        api_server,
        controllers: Some([manager, scheduler]),
    })
    .await?;
    let kubeconfig = plane.kubeconfig_file("default")?;
    writeln!(io::stdout(), "{}", kubeconfig.display())?;
    // Nothing is read. The parent holds the other end for as long as it needs the control plane.
    let ended = tokio::task::spawn_blocking(|| io::stdin().lock().lines().for_each(drop));
    tokio::select! {
        _ = ended => {}
        _ = terminated.recv() => {}
        _ = interrupted.recv() => {}
    }
    drop(plane);
    // The thread that reads the input would be waited for.
    std::process::exit(0)
}
