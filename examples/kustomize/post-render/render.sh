#!/bin/sh
# What Helm renders comes in, what kustomize makes of it goes out.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$here/kustomization.yaml" "$folder/"
cat >"$folder/rendered.yaml"
kubectl kustomize "$folder"
