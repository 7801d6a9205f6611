#!/usr/bin/env bash
# Installs what tests need of Debian (tests/debian_packages.txt), and what is named beside it, where it is missing.
set -euo pipefail
mapfile -t packages < <(grep -v '^#' "$(dirname "$0")/debian_packages.txt")
missing=()
for package in "${packages[@]}" "$@"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
((${#missing[@]})) || exit 0
if ((EUID)); then
  echo "as root: apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
apt-get update -q
# nginx is started by the tests that need it, never as a service of the machine; of prometheus only promtool is used.
DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -q -y --no-install-recommends "${missing[@]}"
