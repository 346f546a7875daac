//! A cluster of one node with the real kubelet, containerd, runc and kube-proxy, and what tests know of it.
//!
//! The node has the namespaces of its process for itself: processes, mounts and network. All of that ends with the
//! process, whatever way that ends. What remains are control groups below one name, one folder, and empty mount points.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

pub mod images;
pub mod network;
mod one_node;
mod power;
mod runtime;

pub use one_node::run;

/// Names the folder of the node to its tests.
pub const NODE: &str = "MAYFLY_TEST_NODE";
/// Registry and path of the images that the node has.
pub const REGISTRY: &str = "registry.example.test/team";
/// Their tag.
pub const TAG: &str = "1.2.3";

/// Where the parts of a node are in its folder.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// That of the node the test runs on, if there is one.
    pub fn of_this_test() -> Option<Self> {
        std::env::var_os(NODE).map(|folder| Self(folder.into()))
    }

    /// The folder of a node that is to be started.
    pub fn new(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// A file or folder in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The kubeconfig of a user who may do everything.
    pub fn kubeconfig(&self) -> PathBuf {
        self.path("kubeconfig")
    }

    /// A file below it is a line of `/etc/hosts` for all pods at once, as a cluster's DNS makes it of a Service.
    pub fn hosts(&self) -> PathBuf {
        self.path("hosts")
    }

    /// The control group of all pods has the name of the folder.
    pub(crate) fn control_group(&self) -> String {
        let name = self.0.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn switch(&self) -> PathBuf {
        self.path("power")
    }

    /// Kills kubelet, containerd and everything in containers at once.
    ///
    /// # Errors
    /// Fails with what went wrong at the node.
    pub fn power_off(&self) -> io::Result<()> {
        self.turn("off")
    }

    /// Starts kubelet and containerd again. Returns when both run, which is before the node is ready.
    ///
    /// # Errors
    /// Fails with what went wrong at the node.
    pub fn power_on(&self) -> io::Result<()> {
        self.turn("on")
    }

    fn turn(&self, word: &str) -> io::Result<()> {
        let mut stream = UnixStream::connect(self.switch())?;
        writeln!(stream, "{word}")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        if answer == "done\n" {
            return Ok(());
        }
        Err(io::Error::other(answer))
    }
}
