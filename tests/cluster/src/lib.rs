//! A Kubernetes cluster for tests.
