//! Classification of NCCL's warnings: causes, and consequences of a cause.
//!
//! When one rank fails, the others' connections close, and each of them warns about that; when a
//! communicator is aborted, NCCL's own threads warn about the operations that were cut off. A table classifies the
//! texts of all releases since 2.18; a text that is not in the table stays [`Class::Unknown`].

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a warning shows about the cause.
///
/// ```
/// use nccl::debug_log::Class;
///
/// let class = Class::of("Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888)");
/// assert_eq!(class, Class::Cause);
/// let class = Class::of("socketProgress: Connection closed by remote peer node-b<41234>");
/// assert_eq!(class, Class::Consequence);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Class {
    /// It may be the first thing that went wrong.
    Cause,
    /// Not known to be of another class.
    Unknown,
    /// Another rank, or an earlier call, failed before.
    Consequence,
    /// From a communicator that is being aborted or destroyed, or harmless.
    Noise,
}

impl Class {
    /// Returns the class of a warning's text.
    ///
    /// ```
    /// use nccl::debug_log::Class;
    /// assert_eq!(Class::of("a text of a release that is not out yet"), Class::Unknown);
    /// ```
    #[must_use]
    pub fn of(text: &str) -> Self {
        KnownWarning::of(text).map_or(Self::Unknown, |known| known.class)
    }
}

/// A stable name: `cause`, `unknown`, `consequence`, `noise`.
impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cause => "cause",
            Self::Unknown => "unknown",
            Self::Consequence => "consequence",
            Self::Noise => "noise",
        })
    }
}

/// Returns whether NCCL gives this warning even if nothing is wrong, as 2.32 does at every start without GDRCopy. The text
/// remains NCCL's last error until another warning replaces it.
#[doc(hidden)]
pub fn is_harmless(text: &str) -> bool {
    text.contains("requires GDRCopy; and GDR Copy is not available")
}

/// An entry of the table of warnings.
#[derive(Debug)]
#[doc(hidden)]
pub struct KnownWarning {
    /// The warning's text contains all of these strings.
    says: &'static [&'static str],
    pub class: Class,
    /// The name of the finding.
    pub check: &'static str,
    /// The remedy; empty if the cause is elsewhere.
    pub fix: &'static str,
}

impl KnownWarning {
    /// Returns the first entry of the table that matches.
    #[doc(hidden)]
    pub fn of(text: &str) -> Option<&'static Self> {
        let fits = |known: &&Self| known.says.iter().all(|words| text.contains(words));
        TABLE.iter().find(fits)
    }
}

/// The common check of failed connections.
#[doc(hidden)]
pub const CONNECT: &str = "log-connect";

macro_rules! table {
    ($($class:ident $check:literal [$($says:literal),+] $fix:expr;)*) => {
        &[$(KnownWarning { says: &[$($says),+], class: Class::$class, check: $check, fix: $fix }),*]
    };
}

const SHM_SPACE: &str = "make /dev/shm larger (docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir \
    with medium: Memory mounted there) and remove nccl-* files that ended jobs left in it";
const SHM_SHARED: &str = "ranks of one host have to see the same /dev/shm: start their containers with --ipc=host \
    or one shared IPC namespace; if the rank that makes the segment failed before, its warning is the cause";
const SHM_OTHER: &str = "look at /dev/shm on that host: does it exist, may the process write there, is there room \
    (df -h /dev/shm)?";
const DEVICE: &str = "give every rank a device of its own: cudaSetDevice(local rank) before NCCL is called, or one \
    CUDA_VISIBLE_DEVICES per rank; sharing one needs NCCL_MULTI_RANK_GPU_ENABLE=1 (2.30.3 and later)";
const INTERFACE: &str = "set NCCL_SOCKET_IFNAME to an interface that is up on that host (ip -brief address), or unset \
    it";
const REACH: &str = "the address must be reachable from that host: set NCCL_SOCKET_IFNAME on all hosts to the \
    interface of their common network, and let the firewall pass all ports between them";
const LOST: &str = "a connection broke that both ranks had in use: look at cable, switch and firewall between the two hosts \
    (ip -statistics link, dmesg), and whether something closes idle connections";
const RANKS: &str = "each process needs a rank of its own, and all the same number of ranks: compare RANK and \
    WORLD_SIZE of all processes, and look for one left over from another run";
const MATCH: &str = "the ranks did not call the same operation with the same count and type, or variables that have to \
    agree (NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE, NCCL_*_NCHANNELS …) differ";
const USAGE: &str = "the program calls NCCL wrongly: fix the call";
const FILES: &str = "raise the limit of open files for the ranks (ulimit -n 1048576, LimitNOFILE= of systemd, \
    --ulimit nofile= of docker)";
const THREADS: &str =
    "raise the limit of processes and threads (ulimit -u, pids.max of the container)";
const PINNED: &str =
    "raise the limit of locked memory (ulimit -l unlimited, --ulimit memlock=-1 of docker)";
const MEMORY: &str = "free memory on the device: NCCL needs some hundred MB per communicator beside the program's; \
    look for another process on it (nvidia-smi)";
const FABRIC: &str = "look at the port, cable and switch of that adapter (ibstat, ibv_devinfo, counters), and at \
    whether the peer's host is alive; NCCL_IB_TIMEOUT=22 bears longer pauses";
const NVLINK: &str =
    "look at nvidia-smi topo -m, nvidia-smi nvlink -s and, on HGX, at nvidia-fabricmanager";
const DRIVER: &str = "the driver on that host does not fit the CUDA that NCCL was built for, or was updated without \
    a restart: nvidia-smi has to work there, and to show a CUDA version that is not older";
const EARLIER: &str = "a kernel that ran before on this device failed, and NCCL is the first to notice: run with \
    CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer";
const KINDS: &str =
    "adapters of InfiniBand and of RoCE cannot be mixed: name those of one kind with NCCL_IB_HCA";

/// The first match counts, so that special entries come before general ones.
const TABLE: &[KnownWarning] = table! {
    // NCCL 2.32, at every start without GDRCopy.
    Noise "log-warning" ["requires GDRCopy; and GDR Copy is not available"] "";
    // A closed connection or an abort, reported by waiting threads.
    Noise "log-teardown" ["Accept failed", "Resource temporarily unavailable"] "";
    Noise "log-teardown" ["Unexpected connections are not empty"] "";
    Noise "log-teardown" ["Call to bind failed", "Address already in use"] "";
    Noise "log-teardown" ["[Service thread]", "close failed"] "";
    Noise "log-teardown" ["[Service thread]", "unlink failed"] "";
    Noise "log-teardown" ["proxyDestroy failed"] "";
    Noise "log-teardown" ["commReclaim: "] "";
    Noise "log-teardown" ["commDestroySync: "] "";
    Noise "log-teardown" ["unlink shared memory"] "";
    Noise "log-teardown" ["ncclProxyStop: "] "";
    Noise "log-teardown" ["is in abort state"] "";
    Noise "log-teardown" ["has already been destroyed"] "";
    // A host without InfiniBand adapters. If the network needs them, its own warnings report that.
    Noise "log-network" ["Failed to open libibverbs"] "";
    Consequence "log-consequence" ["Connection closed by remote peer"] "";
    Consequence "log-consequence" ["Connection closed by localRank"] "";
    Consequence "log-consequence" ["failed : Connection reset by peer"] "";
    Consequence "log-consequence" ["failed : Broken pipe"] "";
    Consequence "log-consequence" ["Socket recv failed while polling for opId"] "";
    Consequence "log-consequence" ["Could not receive type from localRank"] "";
    Consequence "log-consequence" ["Failed to execute operation"] "";
    Consequence "log-consequence" ["Error encountered progressing operation"] "";
    Consequence "log-consequence" ["ncclAsyncJobComplete: job"] "";
    Consequence "log-consequence" ["ncclProxyCallBlocking"] "";
    Consequence "log-consequence" ["ncclProxyClientGetFd call"] "";
    Consequence "log-consequence" ["ncclProxyClientQueryFdBlocking call"] "";
    Consequence "log-consequence" ["communicator encountered a fatal error"] "";
    Consequence "log-consequence" ["ncclCommSetAsyncError: "] "";
    Consequence "log-consequence" ["socket progress error"] "";
    // Between the ranks of a host.
    Cause "log-shared-memory" ["shared memory segment", "No space left on device"] SHM_SPACE;
    Cause "log-shared-memory" ["failed to extend /dev/shm"] SHM_SPACE;
    Cause "log-shared-memory" ["posix_fallocate failed"] SHM_SPACE;
    Cause "log-shared-memory" ["Error while attaching to shared memory segment"] SHM_SHARED;
    Cause "log-shared-memory" ["Error while creating shared memory segment"] SHM_OTHER;
    Cause "log-shared-memory" ["failed to create shared memory file"] SHM_OTHER;
    Cause "log-shared-memory" ["Could not map /dev/shm"] SHM_OTHER;
    Cause "log-peer-access" ["P2P is disabled between NVLINK connected GPUs"] NVLINK;
    Cause "log-peer-access" ["cudaIpcGetMemHandle failed"] SHM_SHARED;
    Cause "log-peer-access" ["cudaIpcOpenMemHandle"] SHM_SHARED;
    Cause "log-peer-access" ["failed to peer with device"] NVLINK;
    Cause "log-nvls" ["Failed to bind NVLink SHARP"] "look at nvidia-fabricmanager and at memory that other jobs hold \
        on these devices; NCCL_NVLS_ENABLE=0 does without";
    Cause "log-transport" ["No transport found for rank"] "the two ranks can use neither P2P, shared memory nor a \
        network: remove NCCL_P2P_DISABLE, NCCL_SHM_DISABLE or NCCL_NET from the environment, or look why the network \
        is missing";
    // Resources.
    Cause "log-open-files" ["Too many open files"] FILES;
    Cause "log-open-files" ["Too many connections ("] FILES;
    Cause "log-threads" ["pthread_create failed"] THREADS;
    Cause "log-locked-memory" ["ibv_reg_mr", "Cannot allocate memory"] PINNED;
    Cause "log-locked-memory" ["ibv_create", "Cannot allocate memory"] PINNED;
    Cause "log-memory" ["Failed to CUDA"] MEMORY;
    Cause "log-memory" ["Cuda failure", "out of memory"] MEMORY;
    Cause "log-space" ["No space left on device"] "make room on that host";
    // The ranks do not match.
    Cause "log-version" ["Mismatched NCCL version detected"] "make all ranks load the same libnccl: compare the images, \
        LD_LIBRARY_PATH and LD_PRELOAD of the hosts";
    Cause "log-device-binding" ["Duplicate GPU detected"] DEVICE;
    Cause "log-device-binding" ["Multiple Ranks are using the same GPU"] DEVICE;
    Cause "log-ranks" ["has already checked in"] RANKS;
    Cause "log-ranks" ["mismatch in info from procs"] RANKS;
    Cause "log-ranks" ["Bootstrap Root : localId"] RANKS;
    Cause "log-mismatch" ["essage truncated"] MATCH;
    Cause "log-mismatch" ["posted incorrect receive info"] MATCH;
    Cause "log-mismatch" ["without a matching"] "a message to oneself needs its counterpart in the same group";
    Cause "log-net-devices" ["Detected mixed local Net device counts"] "the hosts do not have the same number of \
        network adapters: see NCCL_IB_HCA and NCCL_SOCKET_IFNAME there; NCCL_IGNORE_NET_MISMATCH=1 goes on \
        nevertheless";
    // The network.
    Cause "log-interface" ["no socket interface found"] INTERFACE;
    Cause "log-interface" ["NET/Socket : no interface found"] INTERFACE;
    Cause "log-interface" ["No usable listening interface found"] INTERFACE;
    Cause "log-interface" ["NET/IB : No IP interface found"] INTERFACE;
    Cause "log-interface" ["verify NCCL_OOB_NET_IFNAME"] INTERFACE;
    Cause "log-connect" ["exceeded error retry count"] REACH;
    Cause "log-connect" ["onnect to ", "failed"] REACH;
    Cause "log-connect" ["PollConnect", "failed"] REACH;
    Cause "log-connect" ["PollConnect", "no POLLOUT events"] REACH;
    // Not caused by the end of the peer, which resets or closes the connection: those are consequences, above.
    Cause "log-connect" ["Call to send to ", "failed : "] LOST;
    Cause "log-connect" ["Call to recv from ", "failed : "] LOST;
    Cause "log-connect" ["with family", "is neither"] "use IPv4 or IPv6 on all hosts: NCCL_SOCKET_FAMILY";
    Cause "log-adapter" ["incompatible devices"] KINDS;
    Cause "log-adapter" ["device is incompatible with the local"] KINDS;
    Cause "log-adapter" ["Got completion from peer"] FABRIC;
    Cause "log-adapter" ["Got completion with error"] FABRIC;
    Cause "log-adapter" ["async fatal event"] FABRIC;
    Cause "log-adapter" ["NET/IB : Unable to"] FABRIC;
    Cause "log-plugin" ["Failed to initialize any NET plugin"] "see which plugins NCCL_NET_PLUGIN and NCCL_NET ask for, \
        and whether they are there";
    // CUDA and the driver.
    Cause "log-driver" ["driver version is insufficient"] DRIVER;
    Cause "log-driver" ["Failed to find CUDA library"] DRIVER;
    Cause "log-driver" ["nvml", "failed"] DRIVER;
    Cause "log-cuda" ["illegal memory access"] EARLIER;
    Cause "log-cuda" ["unspecified launch failure"] EARLIER;
    Cause "log-cuda" ["device-side assert"] EARLIER;
    Cause "log-cuda" ["Cuda failure", "'initialization error'"] "CUDA was used before this process was forked: start \
        workers by spawn, or touch CUDA in them alone";
    Cause "log-cuda" ["Cuda failure", "'operation not supported'"] "virtual GPUs and some containers lack CUDA's virtual \
        memory or multicast: NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_ENABLE=0 do without";
    Cause "log-cuda" ["Cuda failure"] "see the error that CUDA names, and the Xid messages in the \
        kernel's log of that host, which nccl-doctor reads there";
    // The program.
    Cause "log-usage" ["Invalid NCCL_COMM_ID"] "write NCCL_COMM_ID as HOST:PORT";
    Cause "log-usage" ["argument is NULL"] USAGE;
    Cause "log-usage" ["Invalid rank requested"] RANKS;
    Cause "log-usage" ["Invalid config"] USAGE;
    Cause "log-usage" ["corrupted comm object detected"] "the communicator was freed, or belongs to another library";
    Cause "log-usage" ["before the previous operation returned ncclSuccess"] "a non-blocking communicator has to be \
        polled (ncclCommGetAsyncError) until it is ready";
    Cause "log-usage" ["Blocking and nonblocking communicators"] USAGE;
    Cause "log-usage" ["not in a group call"] USAGE;
    Cause "log-usage" ["argument not initialized via"] USAGE;
    Cause "log-usage" ["communicator was revoked"] "a revoked communicator can only be shrunk, split or destroyed";
};

/// A warning of NCCL's that can be a cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct FirstWarning {
    pub text: String,
    /// The name of the matching entry's check; `None` for a text that is in no entry.
    pub check: Option<String>,
}

impl FirstWarning {
    /// Returns the warning for NCCL's text, if the text can be about a cause.
    #[doc(hidden)]
    pub fn read(text: &str) -> Option<Self> {
        let known = KnownWarning::of(text).filter(|known| known.class == Class::Cause)?;
        Some(Self {
            text: text.to_owned(),
            check: Some(known.check.to_owned()),
        })
    }

    /// Returns whether the device had failed before NCCL used it: because of an earlier kernel.
    #[doc(hidden)]
    pub fn is_of_an_earlier_kernel(&self) -> bool {
        [
            "illegal memory access",
            "unspecified launch failure",
            "device-side assert",
            "misaligned address",
        ]
        .iter()
        .any(|words| self.text.contains(words))
    }

    /// Returns the exhausted resource, if the text names one.
    #[doc(hidden)]
    pub fn resource(&self) -> Option<&'static str> {
        Some(match self.check.as_deref()? {
            "log-shared-memory" if self.text.contains("No space left") => {
                "shared memory (/dev/shm)"
            }
            "log-open-files" => "open files",
            "log-threads" => "threads or processes",
            "log-locked-memory" => "locked memory",
            "log-memory" => "device memory",
            "log-space" => "disk space",
            _ => return None,
        })
    }

    /// Returns the remedy.
    #[doc(hidden)]
    pub fn fix(&self) -> Option<&'static str> {
        Some(KnownWarning::of(&self.text)?.fix).filter(|fix| !fix.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_good_start_says_is_harmless() {
        let said = "RMA/Socket : rma_socket requires GDRCopy; and GDR Copy is not available";
        assert!(is_harmless(said) && Class::of(said) == Class::Noise);
        assert!(!is_harmless("Cuda failure 2 'out of memory'"));
    }

    #[test]
    fn what_follows_from_an_abort_is_no_cause() {
        for noise in [
            "[Service thread] Accept failed Resource temporarily unavailable",
            "Unexpected connections are not empty",
            "Call to bind failed: Address already in use",
        ] {
            assert_eq!(Class::of(noise), Class::Noise, "{noise}");
        }
        for consequence in [
            "socketProgress: Connection closed by remote peer h2<41234>",
            "[Service thread] Could not receive type from localRank 0, res=3, closed=0",
            "[Proxy Service 3] Failed to execute operation Connect from rank 3, retcode 2",
            "Socket recv failed while polling for opId=0x7f6f18cb7f40",
        ] {
            assert_eq!(Class::of(consequence), Class::Consequence, "{consequence}");
        }
    }

    #[test]
    fn what_can_be_a_cause_has_a_name_and_a_fix() {
        let cases = [
            (
                "log-shared-memory",
                "Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes",
            ),
            (
                "log-shared-memory",
                "Error while attaching to shared memory segment /dev/shm/nccl-x (size 0)",
            ),
            (
                "log-connect",
                "socketStartConnect: Connect to 10.37.12.78<46417> failed : Software caused connection abort",
            ),
            (
                "log-connect",
                "ncclOsSocketStartConnect: connect to 10.0.0.2<4000> returned Connection refused, exceeded error retry count after 35 attempts",
            ),
            (
                "log-connect",
                "socketProgressOpt: Call to send to 10.78.0.2<32877> failed : Connection timed out",
            ),
            (
                "log-connect",
                "ncclOsSocketProgressOpt: Call to recv from 10.78.0.2<42262> failed : Software caused connection abort",
            ),
            ("log-interface", "Bootstrap : no socket interface found"),
            (
                "log-version",
                "Mismatched NCCL version detected : rank 1 version 23007 rank 0 version 22800",
            ),
            (
                "log-device-binding",
                "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000",
            ),
            (
                "log-ranks",
                "Bootstrap Root : rank 3 of 8 ranks has already checked in",
            ),
            (
                "log-mismatch",
                "NET/Socket : peer 10.0.0.2<5> message truncated : receiving 8192 bytes instead of 4096.",
            ),
            (
                "log-adapter",
                "NET/IB: Got completion from peer 10.0.0.2<5> with status=IBV_WC_RETRY_EXC_ERR(12)",
            ),
            (
                "log-open-files",
                "Call to socket failed: Too many open files",
            ),
            (
                "log-driver",
                "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
            ),
            (
                "log-cuda",
                "Cuda failure 700 'an illegal memory access was encountered'",
            ),
            ("log-memory", "Cuda failure 2 'out of memory'"),
        ];
        for (check, text) in cases {
            let known = KnownWarning::of(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((known.check, known.class), (check, Class::Cause), "{text}");
            assert!(!known.fix.is_empty(), "{text}");
        }
    }

    #[test]
    fn every_cause_of_the_table_has_a_fix_and_nothing_else_has_one() {
        for known in TABLE {
            assert_eq!(
                known.class == Class::Cause,
                !known.fix.is_empty(),
                "{known:?}"
            );
            assert!(known.check.starts_with("log-"), "{known:?}");
        }
    }
}
