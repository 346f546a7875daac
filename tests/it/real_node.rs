//! The chart, the launcher and the executor on a node with a real kubelet: Helm installs them of their images, the
//! platform dispatches over the release's Service, and runs are pods of containerd and runc.
//!
//! Every namespace enforces the restricted standard of pod security.
