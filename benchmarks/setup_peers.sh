#!/bin/sh
# Environments of the systems that `confide bench` compares with, each its own: benchmarks/setup_peers.sh [FOLDER]
# The folder is .peers unless given; `confide bench --peers FOLDER` looks there. About 3 GB and five minutes.
# torch comes first, at the version of constraints.txt, so that nothing pulls another build.
set -eu
folder=${1:-.peers}
python=${PYTHON:-python3}
here=$(dirname "$0")
torch=$(grep '^torch==' "$here/../constraints.txt")

environment() { # NAME: make it unless it is there
  test -x "$folder/$1/bin/python" || "$python" -m venv "$folder/$1"
}
install() { # NAME REQUIREMENT...
  name=$1
  shift
  echo "installing into $folder/$name: $*"
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

mkdir -p "$folder"
environment pfl
install pfl "$torch"
install pfl "$torch" 'pfl[pytorch]==0.6.0'

environment flower
install flower "$torch" numpy
install flower "$torch" 'flwr[simulation]'

environment fedjax
# Its last release needs jax.tree_map, which newer jax has removed.
install fedjax fedjax==0.0.17 'jax<0.5' 'jaxlib<0.5'
echo "done: confide bench --peers $folder"
