#!/usr/bin/env bash
# Install the browser that tests/integration/test_pages.py opens the reports in, where there is none (Debian, as root).
set -euo pipefail
for name in chromium chromium-browser google-chrome chrome; do
    command -v "$name" >/dev/null && exit
done
start=$SECONDS
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends chromium </dev/null >/dev/null
echo "setup: chromium installed in $((SECONDS - start)) s"
