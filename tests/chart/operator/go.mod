// The definitions of the Prometheus operator's kinds, which the chart renders.
module mayfly.invalid/operator

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.94.1
