//! The profiler plugin: a library of the user to which NCCL reports its operations (`NCCL_PROFILER_PLUGIN`).
//!
//! ```text
//! GroupApi                          ncclGroupStart … ncclGroupEnd, or one call          version 5
//! ├─ CollApi, P2pApi                a call                                              version 5
//! │  └─ Coll, P2p                   an operation, when its launch is posted             (before version 5: below Group)
//! │     ├─ KernelCh                 the operation on the device
//! │     └─ ProxyOp                  the data to or from a rank of another host
//! │        └─ ProxyStep             a part of them
//! └─ KernelLaunch                   the launch of a group's operations                  version 5
//! Group                             all operations of a launch
//! ```
//!
//! A mask of the plugin selects the kinds of events, and the plugin may change it at any time. A call reads the mask once; all
//! events below the call use that value. A selected kind of event brings the events of its ancestors with it.
//!
//! | module | contents |
//! |---|---|
//! | `library` | the plugin's library and table |
//! | `event` | events as C sees them |
//! | `context` | a communicator as the plugin knows it |
//! | `calls` | events of calls and groups, in the calling thread |
//! | `profile` | what an operation keeps from its call |
//! | `launch` | events of a launch's operations |
//! | `proxy` | the proxies of an operation |
//!
//! When no plugin wants events, a call only loads the mask, and a launch does nothing. Not reported are the proxies' own
//! threads (ProxyCtrl), events of network plugins, and one-sided operations, which NCCL does not report either.

mod calls;
mod context;
mod event;
mod launch;
mod library;
mod profile;
mod proxy;

pub(crate) use calls::{Call, call, group_ended, group_ends, operation_begins};
pub(crate) use context::{Context, init};
pub(crate) use launch::Tracker;
pub(crate) use profile::Profile;
pub(crate) use proxy::{Flow, Proxy};

/// Whether the plugin wants any events now.
#[inline]
pub(crate) fn is_wanted() -> bool {
    library::mask() != 0
}
