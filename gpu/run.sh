#!/bin/sh
# Checks nccl on the GPU of this machine, or on the emulator:
#
#     run.sh [quick|full] [--emulated] [--out DIRECTORY]
#
# Writes report.json, report.md and a log per step into DIRECTORY (./report). The exit code is 0 if
# something was tried, and all of it worked as expected. `run.sh --help` lists more.
here=$(cd "$(dirname "$0")" && pwd) || exit 2
check=$here/gpu-check
if [ ! -x "$check" ]; then
    # Packed, to keep the bundle small; unpacked beside this script, or in a temporary directory if this one is read-only.
    [ -w "$here" ] || check=$(mktemp -d)/gpu-check || exit 2
    gzip -dc "$here/gpu-check.gz" > "$check" && chmod +x "$check" || exit 2
fi
exec "$check" run --bundle "$here" "$@"
