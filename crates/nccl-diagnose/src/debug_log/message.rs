//! The meaning of NCCL's lines, in the wording of every release since 2.18.
//!
//! One function reads a text, by its beginning. A text that is cut, or of an unknown release, is [`Message::Other`]:
//! never an error.

use std::net::IpAddr;

use nccl_sys::Version;

use super::tokens::{
    Interface, address, after, bracketed, interface, number, strip_any, unnumbered, version,
};

/// One message of NCCL.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message<'a> {
    Version(Version),
    /// The interface and address at which the ranks first meet.
    Bootstrap(Interface<'a>),
    /// The interfaces that sockets use for data.
    Sockets(Vec<Interface<'a>>),
    /// The adapters that NCCL's own InfiniBand and RoCE transport uses, and its interface beside them.
    Adapters(Vec<&'a str>, Option<Interface<'a>>),
    NoAdapters,
    /// The network of a communicator.
    Network(&'a str),
    Plugin(&'a str, Plugin<'a>),
    Init(Stage, Init<'a>),
    Layout {
        comm: &'a str,
        nodes: u32,
        local_ranks: u32,
    },
    /// How long an init took, and its longest part; in seconds.
    Timings {
        rank: usize,
        ranks: usize,
        total: f64,
        longest: Option<(&'a str, f64)>,
    },
    Channel(Channel<'a>),
    /// All ring connections exist; `gdr` is NCCL's answer about GPU Direct RDMA.
    Rings {
        gdr: Option<bool>,
    },
    /// The order of the ranks in one ring.
    Ring(&'a str),
    /// Whether an adapter can access device memory directly.
    DirectRdma {
        adapter: &'a str,
        enabled: bool,
    },
    /// Why two devices of a host have no peer access to each other.
    NoPeerAccess(&'a str),
    Variable {
        name: &'a str,
        value: &'a str,
    },
    Config {
        field: &'a str,
        value: &'a str,
    },
    Tuning {
        operation: &'a str,
        algorithm: &'a str,
        protocol: &'a str,
    },
    Retry {
        address: Option<IpAddr>,
        reason: &'a str,
    },
    Ended {
        comm: &'a str,
        how: Ending,
    },
    /// `init.cc:1089 -> 2`: a function of NCCL returned an error.
    Trace {
        place: &'a str,
        code: u32,
    },
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plugin<'a> {
    Missing(&'a str),
    Loaded(&'a str),
    Failed(&'a str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Started,
    Completed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Finalized,
    Destroyed,
    Aborted,
    Revoked,
}

/// A communicator, as `Init START` and `Init COMPLETE` describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Init<'a> {
    pub(super) comm: &'a str,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) device: Option<u32>,
    /// The device number `d` of `R[d]` in the lines of channels.
    pub(super) nvml_device: Option<u32>,
    /// The identifier that the ranks share; 2.23 to 2.31 do not write it for a split.
    pub(super) id: Option<&'a str>,
    pub(super) parent: Option<&'a str>,
}

/// How one rank reaches another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Channel<'a> {
    pub(super) from: usize,
    pub(super) to: usize,
    /// The device of the side that printed this.
    pub(super) device: Option<u32>,
    /// Whether the receiver wrote the line.
    pub(super) received: bool,
    pub(super) via: Via<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Via<'a> {
    /// Between devices of one host (or one NVLink domain): `IPC`, `CUMEM`, `direct pointer`, …
    P2p(&'a str),
    /// Through host memory.
    Shm,
    Net {
        net: &'a str,
        adapter: &'a str,
        gdr: bool,
    },
}

/// Reads one message.
pub(super) fn read(text: &str) -> Message<'_> {
    plain(text).unwrap_or(Message::Other)
}

fn plain(text: &str) -> Option<Message<'_>> {
    if let Some(rest) = text.strip_prefix("Channel ") {
        return channel(rest);
    }
    if let Some(rest) = text.strip_prefix("NCCL version ") {
        return version(rest).map(Message::Version);
    }
    if let Some(rest) = strip_any(text, &["Bootstrap: Using ", "Bootstrap : Using "]) {
        return Some(Message::Bootstrap(interface(unnumbered(rest))));
    }
    if let Some(rest) = strip_any(text, &["NET/Socket : Using ", "NET/Socket: Using "]) {
        // `Using 0 threads and 0 sockets per thread` is another line.
        return rest.starts_with('[').then(|| {
            let interfaces = rest.split_whitespace().map(unnumbered).map(interface);
            Message::Sockets(interfaces.take(MOST_LISTED).collect())
        });
    }
    if let Some(rest) = strip_any(text, &["NET/IB : ", "NET/IB: "]) {
        return adapters(rest);
    }
    if text.starts_with("Failed to open libibverbs.so") {
        return Some(Message::NoAdapters);
    }
    if let Some(name) = text.strip_prefix("Using network ") {
        return Some(Message::Network(name));
    }
    if let Some(message) = plugin(text) {
        return Some(message);
    }
    if let Some(message) = init(text) {
        return Some(message);
    }
    if let Some(message) = layout(text) {
        return Some(message);
    }
    if let Some(rest) = text.strip_prefix("Init timings") {
        return timings(rest);
    }
    if let Some(rest) = text.strip_prefix("Connected all rings") {
        let gdr = rest
            .split_once("GDR ")
            .map(|(_, gdr)| !gdr.starts_with('0'));
        return Some(Message::Rings { gdr });
    }
    if let Some(message) = direct_rdma(text) {
        return Some(message);
    }
    if strip_any(text, NO_PEER_ACCESS).is_some() {
        return Some(Message::NoPeerAccess(text));
    }
    if let Some(rest) = text.strip_prefix("Comm config ") {
        let (field, value) = rest
            .split_once(" set to ")
            .or_else(|| rest.split_once(" reset to "))?;
        return Some(Message::Config { field, value });
    }
    if text.starts_with("NCCL_") {
        return variable(text);
    }
    if let Some(message) = retry(text) {
        return Some(message);
    }
    ended(text).or_else(|| tuning(text)).or_else(|| trace(text))
}

/// Interfaces and adapters read from one line.
const MOST_LISTED: usize = 64;

const NO_PEER_ACCESS: &[&str] = &[
    "peer query failed between dev",
    "Could not enable P2P between dev",
    "Legacy IPC not supported",
    "P2P is disabled between connected GPUs",
    "P2P is disabled between NVLINK connected GPUs",
];

/// `Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>`
fn adapters(rest: &str) -> Option<Message<'_>> {
    if rest.starts_with("No device found") {
        return Some(Message::NoAdapters);
    }
    let list = rest.strip_prefix("Using ")?;
    let (list, beside) = match list.split_once("; OOB ") {
        Some((list, beside)) => (list, Some(interface(beside))),
        None => (list, None),
    };
    let names = list.split_whitespace().filter_map(|word| {
        let (number, name) = word.strip_prefix('[')?.split_once(']')?;
        (number.parse::<u32>().is_ok() && !name.is_empty()).then_some(name)
    });
    Some(Message::Adapters(names.take(MOST_LISTED).collect(), beside))
}

/// `NET/Plugin: …`, `TUNER/Plugin: …`; and the wording of 2.27 and later for network plugins.
fn plugin(text: &str) -> Option<Message<'_>> {
    let failed = [
        "Failed to initialize NET plugin ",
        "External network plugin ",
    ];
    if let Some(name) = strip_any(text, &failed) {
        let name = name.split(" is unsupported").next()?;
        // NCCL's own transports are tried like plugins.
        return (!matches!(name, "IB" | "Socket"))
            .then_some(Message::Plugin("NET", Plugin::Failed(name)));
    }
    let loaded = [
        "Successfully loaded external network plugin ",
        "Assigned NET plugin ",
    ];
    if let Some(name) = strip_any(text, &loaded) {
        let name = name.split_whitespace().next()?;
        return (!matches!(name, "IB" | "Socket"))
            .then_some(Message::Plugin("NET", Plugin::Loaded(name)));
    }
    let (kind, rest) = text.split_once("/Plugin")?;
    let known = ["NET", "TUNER", "PROFILER", "ENV", "GIN", "RMA"];
    if !known.contains(&kind) {
        return None;
    }
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    let stated = |state| Some(Message::Plugin(kind, state));
    if let Some(names) = rest.strip_prefix("Could not find:") {
        return stated(Plugin::Missing(names.split(". ").next()?.trim()));
    }
    if rest.starts_with("No plugin found") {
        return stated(Plugin::Missing(""));
    }
    let loaded = [
        "Loaded net plugin ",
        "Using tuner plugin ",
        "Loaded ",
        "loaded ",
    ];
    if let Some(name) = strip_any(rest, &loaded) {
        // `Loaded collnet plugin SHARP (v8)` is about another kind of plugin.
        let word = name.split_whitespace().next()?;
        return (!matches!(word, "coll" | "collnet" | "gin" | "rma"))
            .then_some(Message::Plugin(kind, Plugin::Loaded(word)));
    }
    // Written by 2.30 whether or not there is such a file, for the default names; a plugin that was asked for by
    // another name is reported below.
    if let Some(rest) = rest.strip_prefix("Failed to load external plugin ")
        && ["libnccl-gin.so,", "libnccl-rma.so,"]
            .iter()
            .any(|name| rest.starts_with(name))
        && rest.contains("dlHandle: (nil)")
    {
        return stated(Plugin::Missing(""));
    }
    let is_too_old = rest.contains("ncclNetPlugin symbols v4 and lower are not supported");
    if is_too_old {
        return stated(Plugin::Failed("it is too old for this NCCL"));
    }
    // `libnccl-net.so: undefined symbol: …`, `Plugin load (libnccl-net.so) returned 2 : …`.
    let names_a_file = rest.contains(".so");
    let is_error = names_a_file
        && !rest.starts_with("Plugin name set")
        && !rest.contains("No such file or directory");
    if is_error {
        return stated(Plugin::Failed(rest));
    }
    (names_a_file && rest.contains("No such file"))
        .then_some(Message::Plugin(kind, Plugin::Missing("")))
}

/// `[Rank 0] ncclCommInitRank comm 0x… rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1000 commId 0x… - Init START`
fn init(text: &str) -> Option<Message<'_>> {
    let (text, stage) = match (
        text.strip_suffix("- Init START"),
        text.strip_suffix("- Init COMPLETE"),
    ) {
        (Some(text), _) => (text, Stage::Started),
        (_, Some(text)) => (text, Stage::Completed),
        _ => return None,
    };
    let numbered = |key| after(text, key).and_then(|word| word.parse().ok());
    let usable = |key| numbered(key).and_then(|number: usize| u32::try_from(number).ok());
    let init = Init {
        comm: after(text, "comm ")?,
        rank: numbered("rank ")?,
        ranks: numbered("nranks ")?,
        device: usable("cudaDev "),
        nvml_device: usable("nvmlDev "),
        id: after(text, "commId "),
        parent: after(text, "parent "),
    };
    (init.rank < init.ranks).then_some(Message::Init(stage, init))
}

fn layout(text: &str) -> Option<Message<'_>> {
    let rest = text.strip_prefix("comm ")?;
    let number = |key| after(rest, key)?.parse().ok();
    Some(Message::Layout {
        comm: rest.split_whitespace().next()?,
        nodes: number("nNodes ")?,
        local_ranks: number("localRanks ")?,
    })
}

/// ` - ncclCommInitRank: rank 0 nranks 8 total 3.21 (kernels 0.31, alloc 0.10, …)`; 2.22 names no function.
fn timings(rest: &str) -> Option<Message<'_>> {
    let (_, rest) = rest.split_once(": ")?;
    let parts = rest.split_once('(').map_or("", |(_, parts)| parts);
    let parts = parts.trim_end_matches(')').split(", ");
    let seconds = |text: &str| {
        text.parse()
            .ok()
            .filter(|seconds: &f64| seconds.is_finite())
    };
    let longest = parts
        .filter_map(|part| {
            let (name, value) = part.split_once(' ')?;
            Some((name, seconds(value)?))
        })
        .max_by(|a, b| a.1.total_cmp(&b.1));
    Some(Message::Timings {
        rank: after(rest, "rank ")?.parse().ok()?,
        ranks: after(rest, "nranks ")?.parse().ok()?,
        total: seconds(after(rest, "total ")?)?,
        longest,
    })
}

/// `00/0 : 1[1] -> 2[2] [send] via NET/IB/0(3)/GDRDMA`, or `00/02 :    0   1   2`.
fn channel(rest: &str) -> Option<Message<'_>> {
    let (_, rest) = rest.split_once(" : ")?;
    let Some((ends, via)) = rest.split_once(" via ") else {
        let order = rest.trim();
        let is_order = !order.is_empty()
            && order
                .bytes()
                .all(|byte| byte == b' ' || byte.is_ascii_digit());
        return is_order.then_some(Message::Ring(order));
    };
    let (from, ends) = number(ends)?;
    let (own, ends) = bracketed(ends)?;
    let (to, ends) = number(ends.strip_prefix(" -> ")?)?;
    let (other, ends) = bracketed(ends)?;
    let received = ends.trim() == "[receive]";
    Some(Message::Channel(Channel {
        from,
        to,
        device: if received { other } else { own },
        received,
        via: route(via)?,
    }))
}

fn route(via: &str) -> Option<Via<'_>> {
    if let Some(kind) = via.strip_prefix("P2P/") {
        return Some(Via::P2p(kind.split('/').next()?));
    }
    if via.starts_with("SHM/") || via.starts_with("direct shared memory") {
        return Some(Via::Shm);
    }
    // `NET/IB/0`, `NET/AWS Libfabric/0/GDRDMA`, `NET/IB/3(5)/GDRDMA(PCI)/Shared`
    let rest = via.strip_prefix("NET/")?;
    let mut parts = rest.split('/');
    let net = parts.next()?;
    let adapter = parts.next().unwrap_or_default();
    Some(Via::Net {
        net,
        adapter: adapter.split('(').next()?,
        gdr: parts.any(|part| part.starts_with("GDRDMA")),
    })
}

/// `NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'`
fn direct_rdma(text: &str) -> Option<Message<'_>> {
    let rest = text.strip_prefix("NET/")?;
    let (_, rest) = rest.split_once(": GPU Direct RDMA ")?;
    let enabled = rest.starts_with("Enabled");
    let (_, name) = rest.split_once('\'')?;
    Some(Message::DirectRdma {
        adapter: name.split('\'').next()?,
        enabled,
    })
}

/// `NCCL_X set by environment to V.`, `NCCL_IB_HCA set to V`
fn variable(text: &str) -> Option<Message<'_>> {
    let (name, value) = text
        .split_once(" set by environment to ")
        .or_else(|| text.split_once(" set to "))?;
    let is_name = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    is_name.then(|| Message::Variable {
        name,
        value: value.strip_suffix('.').unwrap_or(value),
    })
}

/// `ncclOsSocketStartConnect: connect to 10.0.0.2<4000> returned Connection refused, retrying (1/34) …`;
/// before 2.24, each thousandth time and without the address, `Call to connect returned …, retrying`.
fn retry(text: &str) -> Option<Message<'_>> {
    let (rest, _) = text.split_once(", retrying")?;
    if let Some(reason) = rest.strip_prefix("Call to connect returned ") {
        let address = None;
        return Some(Message::Retry { address, reason });
    }
    let (_, rest) = rest.split_once(": connect to ")?;
    let (to, reason) = rest.split_once(" returned ")?;
    Some(Message::Retry {
        address: address(to),
        reason,
    })
}

fn ended(text: &str) -> Option<Message<'_>> {
    let comm = text.strip_prefix("comm ")?.split_whitespace().next()?;
    let (_, last) = text.rsplit_once(" - ")?;
    let how = match last.split([',', ' ']).collect::<Vec<_>>()[..] {
        ["Finalize", "COMPLETE", ..] => Ending::Finalized,
        ["Destroy", "COMPLETE", ..] => Ending::Destroyed,
        ["Abort", "COMPLETE", ..] => Ending::Aborted,
        ["Revoke", "COMPLETE", ..] => Ending::Revoked,
        _ => return None,
    };
    Some(Message::Ended { comm, how })
}

/// `AllReduce: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..31}`
fn tuning(text: &str) -> Option<Message<'_>> {
    let (operation, rest) = text.split_once(": ")?;
    let (_, rest) = rest.split_once(" Bytes -> Algo ")?;
    Some(Message::Tuning {
        operation,
        algorithm: rest.split_whitespace().next()?,
        protocol: after(rest, "proto ")?,
    })
}

/// `init.cc:1089 -> 2`, with `[Async thread]` or an errno's text behind it; 2.32 adds `(function)` to the place.
fn trace(text: &str) -> Option<Message<'_>> {
    let (place, rest) = text.split_once(" -> ")?;
    let place = place.split(" (").next()?;
    let (file, line) = place.rsplit_once(':')?;
    let is_place = !file.contains(' ')
        && [".cc", ".h", ".cu", ".c"]
            .iter()
            .any(|end| file.ends_with(end))
        && line.bytes().all(|byte| byte.is_ascii_digit());
    let (code, _) = number(rest)?;
    is_place.then_some(Message::Trace { place, code })
}
