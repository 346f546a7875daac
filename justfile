# Every command CI runs, runnable by hand. `just` lists them.

_default:
    @just --list

# Format the code
fmt:
    cargo fmt --all

# What CI checks besides the tests: lint, fuzz, chart, cluster, tools, images, node, chaos, bench
ci *stages:
    cargo xtask ci {{ stages }}

# Install what the tests need
setup:
    cargo xtask setup

# Unit tests and journeys
test *filters:
    cargo xtask test {{ if filters == "" { "" } else { "-- " + filters } }}

# Licences, sources and bans of the dependency tree
deny:
    cargo deny --locked check bans licenses sources

# Known vulnerabilities; apart, so that news does not break builds
advisories:
    cargo deny --locked check advisories

# Build the images without a daemon
image *options:
    cargo xtask image {{ options }}

# Measure against the baselines and goals
bench *options:
    cargo xtask bench {{ options }}

# Many runs while everything around them fails in turn
chaos *options:
    cargo xtask chaos {{ options }}

# Journeys against a live Terrakube
conformance *options:
    cargo xtask conformance {{ options }}
