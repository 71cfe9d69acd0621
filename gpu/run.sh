#!/bin/sh
# Checks nccl on the GPU of this machine, or on the emulator:
#
#     run.sh [quick|full] [--emulated] [--out DIRECTORY]
#
# Writes report.json, report.md and a log per step into DIRECTORY (./report). The exit code is 0 if
# everything that could be tried did what it should. `run.sh --help` lists more.
here=$(cd "$(dirname "$0")" && pwd) || exit 2
check=$here/gpu-check
if [ ! -x "$check" ]; then
    # Packed, because little may be taken along; beside this script, or elsewhere where nothing can be written there.
    [ -w "$here" ] || check=$(mktemp -d)/gpu-check || exit 2
    gzip -dc "$here/gpu-check.gz" > "$check" && chmod +x "$check" || exit 2
fi
exec "$check" run --bundle "$here" "$@"
