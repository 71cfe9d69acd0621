//! NCCL's variables, and which of them the ranks have to agree on.
//!
//! All names are those of the releases from 2.18 to 2.30, without `NCCL_`. For almost none of them does NCCL document
//! whether the value may differ between ranks; the lists follow from how NCCL uses the values.

/// What happens when the ranks do not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Both ends of a connection, or all ranks, decide by their own values and never compare them. If the values
    /// differ, NCCL hangs, fails, or computes a wrong result.
    Must,
    /// If the values differ, NCCL settles on one of them, or becomes slow.
    Should,
    /// The value depends on the host, but either all hosts must have one or none.
    PerHost,
    /// The values may differ, or the variable has no effect on the other ranks.
    Free,
}

/// `NAME` or `NAME=DEFAULT`. A default is given if it is the same in all releases: a rank that sets this value agrees
/// with a rank that does not set the variable.
const MUST: &str = "\
    COMM_ID OOB_NET_ENABLE=0 SOCKET_MAGIC SOCKET_FAMILY NET NET_PLUGIN MULTI_RANK_GPU_ENABLE=0
    CHECK_MODE COLLNET_ENABLE COLLNET_NODE_THRESHOLD=2 MNNVL_ENABLE=2 ALGO PROTO TUNER_PLUGIN
    NTHREADS=-2 LL128_NTHREADS=-2 THREAD_THRESHOLDS PAT_ENABLE=2 NVLS_NCHANNELS
    NVLS_CHUNKSIZE=131072 ALLGATHERV_ENABLE=1 CTA_POLICY SYM_KERNEL SYM_CTAS=0 SYM_CE_THRESHOLD
    SYM_NOWIN_ENABLE=0 SYM_TMA_ENABLE=0 SYM_RS_GIN_CHUNK_SIZE=-1 SINGLE_PROC_MEM_REG_ENABLE=0
    BUFFSIZE=-2 LL_BUFFSIZE=-2 LL128_BUFFSIZE=-2 P2P_NET_CHUNKSIZE=131072
    P2P_PCI_CHUNKSIZE=131072 P2P_NVL_CHUNKSIZE=524288 CHUNK_SIZE=0 P2P_LL_THRESHOLD=16384
    ALLOC_P2P_NET_LL_BUFFERS=0 MIN_NCHANNELS=-2 MAX_NCHANNELS=-2 MIN_NRINGS=-2 MAX_NRINGS=-2
    MIN_CTAS MAX_CTAS MIN_P2P_NCHANNELS=1 MAX_P2P_NCHANNELS WORK_ARGS_BYTES
    P2P_SCHEDULE_GROUP_SIZE CGA_CLUSTER_SIZE P2P_LEVEL P2P_DISABLE=0
    P2P_DIRECT_DISABLE=0 SHM_DISABLE=0 SHM_LOCALITY P2P_USE_CUDA_MEMCPY=0 P2P_READ_ENABLE=-2
    NVB_DISABLE=0 PXN_DISABLE=0 P2P_PXN_LEVEL=2 NET_SHARED_BUFFERS=-2 NET_SHARED_COMMS=1
    RUNTIME_CONNECT=1 CUMEM_ENABLE CUMEM_HOST_ENABLE WIN_ENABLE=1 WIN_STRIDE=-1 NUM_RMA_CTX
    GIN_ENABLE=1 GIN_TYPE=-1 LAUNCH_ORDER_IMPLICIT=0";

const SHOULD: &str = "\
    IGNORE_NET_MISMATCH IGNORE_COLLNET_MISMATCH NVLS_ENABLE=2 NCHANNELS_PER_NET_PEER
    P2P_MAX_PEERS CROSS_NIC=2 LOCAL_REGISTER=1 GRAPH_REGISTER LEGACY_CUDA_REGISTER=0
    GRAPH_MIXING_SUPPORT GRAPH_STREAM_ORDERING COMM_SPLIT_SHARE_RESOURCES
    COMM_SHRINK_SHARE_RESOURCES IB_DISABLE=0 IB_MERGE_NICS=1 IB_QPS_PER_CONNECTION=1
    IB_SPLIT_DATA_ON_QPS IB_RECEIVER_SIDE_MATCHING_SCHEME=-2 IB_OOO_RQ=0 IB_ECE_ENABLE=1
    IB_TIMEOUT IB_RETRY_CNT NET_GDR_LEVEL SET_STACK_SIZE=0 RAS_ENABLE=1 TUNER_CONFIG_PATH
    TUNER_CONFIG_FILE GRAPH_FILE";

const PER_HOST: &str = "\
    SOCKET_IFNAME OOB_NET_IFNAME IB_HCA IB_GID_INDEX IB_ADDR_FAMILY IB_ADDR_RANGE
    IB_ROCE_VERSION_NUM IB_TC IB_SL IB_PKEY SOCKET_NTHREADS NSOCKS_PERTHREAD TOPO_FILE";

/// The other variables of NCCL, its plugins, its tests and its installers.
const FREE: &str = "\
    AGG_CHANNEL_SIZE ASYNC_ERROR_HANDLING BLOCKING_WAIT CHECKS_DISABLE CHECK_POINTERS
    COLLNET_PLUGIN COMM_BLOCKING CONF_FILE CONNECT_ROUND_MAX_PEERS CREATE_THREAD_CONTEXT
    CUDA_PATH DEBUG DEBUG_FILE DEBUG_LEVELS DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT
    DEBUG_TIMESTAMP_LEVELS DESYNC_DEBUG DEV_API_JIT DISABLE_MEM_MANAGER DMABUF_ENABLE
    ELASTIC_BUFFER_REGISTER ENV_PLUGIN GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE
    GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_CONNECTION_RAIL
    GIN_COUNTER_POOL_SIZE GIN_ERROR_QUERY_SEC GIN_EXCLUSIVE_CONTEXTS
    GIN_GDAKI_MAX_DEST_RD_ATOMIC GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER
    GIN_GDAKI_QP_DEPTH GIN_IB_TC GIN_NCONNECTIONS GIN_NCONTEXTS GIN_PLUGIN GIN_PROXY_QUEUE_SIZE
    GIN_SIGNAL_POOL_SIZE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK GRAPH_HELPER_DISABLE
    GROUP_CUDA_STREAM HOME HOSTID IBVERBS_LIB IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD
    IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DEVICE_PCI_ORDER IB_FIFO_TC IB_IS_GLOBAL IB_MERGE_VFS
    IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_PCI_RELAXED_ORDERING
    IB_PREPOST_RECEIVE_WORK_REQUESTS IB_QUERY_PORT_SPEED IB_RESILIENCY_PORT_FAILOVER
    IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY
    IB_RESILIENCY_PORT_RECOVERY IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX
    IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETURN_ASYNC_EVENTS IB_ROUTABLE_FLID_GID_INDEX
    IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_USE_INLINE IB_WARN_RAIL_LOCAL
    IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P INCLUDE_DIR INSPECTOR_DUMP_DIR INSPECTOR_ENABLE
    IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LAUNCH_RACE_FATAL LIBRARY
    LIB_DIR LL128_C2C LSA_TEAM_SIZE MEM_SYNC_DOMAIN MLOPART_RDMA_ENABLE MNNVL_CLIQUE_ID
    MNNVL_CROSS_CLIQUE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID
    MULTI_SEGMENT_REGISTER NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE
    NET_GDR_C2C NET_GDR_MLOPART NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY
    NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NO_CACHE NVB_PRECONNECT
    NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE NVTX_DISABLE P2P_EPOCH_ENABLE
    P2P_PER_CHANNEL_NET_BW PARAM_DUMP_ALL PLUGIN_P2P PROFILER_PLUGIN PROFILE_DUMP_FILE
    PROFILE_EVENT_MASK PROGRESS_APPENDOP_FREQ PROXY_APPEND_BATCH_SIZE PROXY_CPUSET
    PROXY_DUMP_SIGNAL PROXY_PROFILE PXN_C2C RAS_ADDR RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS
    RMA_DISABLE RMA_PLUGIN RMA_PROXY_DUMP_SIGNAL RMA_PROXY_QUEUE_SIZE ROOT SET_CPU_STACK_SIZE
    SET_THREAD_NAME SHADOW_MEMPOOL_MAX_SIZE SHARP_DISABLE SHARP_MAX_COMMS SHM_MEMCPY_MODE
    SHM_USE_CUDA_MEMCPY SOCKET_INLINE SOCKET_MIN_TASKSIZE SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF
    SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF SYM_GIN_KERNELS_ENABLE
    SYM_REUSE_SYSMEM_HANDLES TESTS_VERSION TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_SPLIT_MLOPART
    UCX_TLS UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS VERSION
    WARN_ENABLE_DEBUG_INFO WORK_FIFO_BYTES WORK_FIFO_DEPTH";

/// Variables of earlier releases of NCCL that have no effect any more.
const REMOVED: &str = "SINGLE_RING_THRESHOLD LL_THRESHOLD TREE_THRESHOLD";

/// Prefixes of variables of other programs, whose names cannot be listed.
const FOREIGN: [&str; 12] = [
    "RUN_",
    "EMULATOR_",
    "TEST_",
    "TESTS_",
    "OFI_",
    "FASTRAK_",
    "GPUDIRECTTCPX_",
    "GPUDIRECTTCPXO_",
    "SHARP_",
    "PROFILER_",
    "INSPECTOR_",
    "PLUGIN_",
];

/// A variable that NCCL knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct KnownVariable {
    pub agreement: Agreement,
    pub default: Option<i64>,
}

/// Returns the entry for a variable, by its full name.
pub fn find(name: &str) -> Option<KnownVariable> {
    let short = name.strip_prefix("NCCL_")?;
    let lists = [
        (MUST, Agreement::Must),
        (SHOULD, Agreement::Should),
        (PER_HOST, Agreement::PerHost),
        (FREE, Agreement::Free),
    ];
    lists.into_iter().find_map(|(list, agreement)| {
        let entry = list.split_ascii_whitespace().find_map(|entry| {
            let (name, default) = entry.split_once('=').unwrap_or((entry, ""));
            (name == short).then_some(default)
        })?;
        let default = entry.parse().ok();
        Some(KnownVariable { agreement, default })
    })
}

/// Returns whether ranks have to agree on a variable; a variable that NCCL does not know may differ.
pub fn agreement(name: &str) -> Agreement {
    find(name).map_or(Agreement::Free, |known| known.agreement)
}

/// Returns whether the variable existed in an earlier release of NCCL.
pub fn is_removed(name: &str) -> bool {
    let short = name.strip_prefix("NCCL_");
    short.is_some_and(|short| REMOVED.split(' ').any(|removed| removed == short))
}

/// Returns whether it has the name of another program's variable.
pub fn is_foreign(name: &str) -> bool {
    let short = name.strip_prefix("NCCL_").unwrap_or(name);
    FOREIGN.iter().any(|prefix| short.starts_with(prefix))
}

/// Returns the known variable that `name` was probably meant to be: the closest one, if it is close enough.
pub fn closest(name: &str) -> Option<String> {
    let short = name.strip_prefix("NCCL_").unwrap_or(name);
    // Two typing errors, and fewer in short names.
    let most = (short.len() / 4).min(2);
    [MUST, SHOULD, PER_HOST, FREE]
        .iter()
        .flat_map(|list| list.split_ascii_whitespace())
        .map(|entry| entry.split_once('=').map_or(entry, |(name, _)| name))
        .filter_map(|known| Some((distance(short, known, most)?, known)))
        .min()
        .map(|(_, known)| format!("NCCL_{known}"))
}

/// Returns how many letters have to be changed, inserted, deleted or swapped with their neighbour, if that is at
/// most `most`.
fn distance(a: &str, b: &str, most: usize) -> Option<usize> {
    if a.len().abs_diff(b.len()) > most {
        return None;
    }
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let mut best = (rows[i][j] + usize::from(x != y))
                .min(rows[i][j + 1] + 1)
                .min(row[j] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                best = best.min(rows[i - 1][j - 1] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    let found = *rows.last()?.last()?;
    (found <= most).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_variable_is_in_one_list_only() {
        let mut all: Vec<&str> = [MUST, SHOULD, PER_HOST, FREE, REMOVED]
            .iter()
            .flat_map(|list| list.split_ascii_whitespace())
            .map(|entry| entry.split_once('=').map_or(entry, |(name, _)| name))
            .collect();
        assert!(all.len() > 230, "{}", all.len());
        all.sort_unstable();
        for pair in all.windows(2) {
            assert_ne!(pair[0], pair[1]);
        }
    }

    #[test]
    fn what_was_misspelt_is_recognized_and_other_programs_variables_are_not() {
        for (wrong, right) in [
            ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
            ("NCCL_SCOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
            ("NCCL_P2P_DISABLED", "NCCL_P2P_DISABLE"),
            ("NCCL_DEBUGS", "NCCL_DEBUG"),
            ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
            ("NCCL_BUFFSZE", "NCCL_BUFFSIZE"),
        ] {
            assert_eq!(closest(wrong).as_deref(), Some(right), "{wrong}");
        }
        for other in ["NCCL_X", "NCCL_MY_LAUNCHERS_OWN", "NCCL_FOO", "NCCL_"] {
            assert_eq!(closest(other), None, "{other}");
        }
        assert!(is_foreign("NCCL_RUN_SECRET") && is_foreign("NCCL_OFI_NDEV"));
        assert!(!is_foreign("NCCL_SOCKET_IFNAME"));
    }

    #[test]
    fn defaults_and_agreements_are_found_by_name() {
        let algorithm = find("NCCL_ALGO").unwrap();
        assert_eq!(
            (algorithm.agreement, algorithm.default),
            (Agreement::Must, None)
        );
        assert_eq!(find("NCCL_P2P_DISABLE").unwrap().default, Some(0));
        assert_eq!(
            find("NCCL_SOCKET_IFNAME").unwrap().agreement,
            Agreement::PerHost
        );
        assert_eq!(find("NCCL_DEBUG").unwrap().agreement, Agreement::Free);
        assert_eq!(find("ALGO"), None);
        assert!(is_removed("NCCL_LL_THRESHOLD"));
    }
}
