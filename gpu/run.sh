#!/bin/sh
# Checks nccl on the GPU of this machine, or on the emulator:
#
#     run.sh [quick|full] [--emulated] [--out DIRECTORY]
#
# Writes report.json, report.md and a log per step into DIRECTORY (./report). The exit code is 0 if
# everything that could be tried did what it should. `run.sh --help` lists more.
here=$(cd "$(dirname "$0")" && pwd) || exit 2
[ -x "$here/gpu-check" ] || chmod +x "$here/gpu-check" || exit 2
exec "$here/gpu-check" run --bundle "$here" "$@"
