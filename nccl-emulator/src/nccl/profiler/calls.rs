//! Events of calls and groups, which begin and end in the calling thread.
//!
//! The event of a group begins with its first operation, in the context of that operation's communicator, and ends with the
//! group. A call outside of a group is a group of its own. Like NCCL, this code counts the depth from that operation on.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::context::{Context, Telling};
use super::event::{Event, Handle, Kind, State, bits};
use super::library;
use super::profile::Profile;
use crate::nccl::task::Function;
use crate::numbers::datatype::DataType;

/// The kinds of events below the event of a group.
const IN_GROUP: i32 = bits::GROUP_API
    | bits::P2P_API
    | bits::COLL_API
    | bits::KERNEL_LAUNCH
    | bits::GROUP
    | bits::COLL
    | bits::P2P
    | bits::BELOW_TASK
    | bits::COPY_ENGINE;
const IN_COLLECTIVE: i32 = bits::COLL_API | bits::COLL | bits::BELOW_TASK | bits::COPY_ENGINE;
const IN_MESSAGE: i32 = bits::P2P_API | bits::P2P | bits::BELOW_TASK;

/// The open event of the thread's group.
struct Open {
    context: Arc<Context>,
    handle: Handle,
    /// Whether the state of the group's end was not recorded yet.
    is_collecting: bool,
}

thread_local! {
    /// The depth of groups since the event of the thread's group began; 0 without an event.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether there is such an event. Without a profiler, the end of a group reads only this.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
    static OPEN: RefCell<Option<Open>> = const { RefCell::new(None) };
}

/// An operation, as it was called.
pub(crate) struct Call {
    pub(crate) function: Function,
    pub(crate) count: usize,
    pub(crate) data_type: DataType,
    /// The root of a collective; `None` for a message.
    pub(crate) root: Option<i32>,
    pub(crate) stream: usize,
    pub(crate) is_captured: bool,
    pub(crate) tag: u64,
    /// The depth of the thread's groups, with that of the call itself.
    pub(crate) depth: u32,
}

impl Call {
    /// Returns what the operation keeps for its events, reported with these parents.
    fn profile(&self, mask: i32, group_api: Handle, api: Handle) -> Profile {
        Profile {
            mask,
            group_api,
            api,
            count: self.count as u64,
            data_type: self.data_type,
            tag: self.tag,
        }
    }
}

/// Reports a call. Returns the data that its operation needs later, or `None` if the plugin wants no events.
pub(crate) fn call(context: &Arc<Context>, call: &Call) -> Option<Profile> {
    let mask = library::mask();
    if mask == 0 {
        return None;
    }
    let Some(telling) = context.telling().filter(Telling::knows_calls) else {
        return Some(call.profile(mask, Handle::NONE, Handle::NONE));
    };
    let group = group_event(context, &telling, mask, call);
    let (wanted, kind) = match call.root {
        Some(root) => (
            IN_COLLECTIVE,
            Kind::CollApi {
                function: call.function,
                count: call.count,
                data_type: call.data_type,
                root,
                stream: call.stream,
                captured: call.is_captured,
                tag: call.tag,
            },
        ),
        None => (
            IN_MESSAGE,
            Kind::P2pApi {
                function: call.function,
                count: call.count,
                data_type: call.data_type,
                stream: call.stream,
                captured: call.is_captured,
            },
        ),
    };
    let mut handle = Handle::NONE;
    if mask & wanted != 0 {
        handle = telling.start(&Event {
            parent: group,
            rank: 0,
            kind,
        });
        // The handle remains the parent of the operation's event.
        telling.stop(&mut { handle });
    }
    Some(call.profile(mask, group, handle))
}

/// Returns the event of the thread's group, and begins it if necessary.
fn group_event(context: &Arc<Context>, telling: &Telling<'_>, mask: i32, call: &Call) -> Handle {
    if DEPTH.get() == 0 && mask & IN_GROUP != 0 {
        let handle = telling.start(&Event {
            parent: Handle::NONE,
            rank: 0,
            kind: Kind::GroupApi {
                captured: call.is_captured,
                depth: call.depth as i32,
            },
        });
        telling.record(handle, State::GroupStartApiStop, 0);
        DEPTH.set(call.depth);
        IS_OPEN.set(true);
        OPEN.set(Some(Open {
            context: Arc::clone(context),
            handle,
            is_collecting: true,
        }));
    }
    OPEN.with_borrow(|open| open.as_ref().map_or(Handle::NONE, |open| open.handle))
}

/// Called when an operation opens the group of its own call.
#[inline]
pub(crate) fn operation_begins() {
    let depth = DEPTH.get();
    if depth > 0 {
        DEPTH.set(depth + 1);
    }
}

/// Called at the beginning of the end of a group, whatever its depth.
#[inline]
pub(crate) fn group_ends() {
    if IS_OPEN.get() {
        leave();
    }
}

#[cold]
fn leave() {
    let depth = DEPTH.get();
    DEPTH.set(depth.saturating_sub(1));
    if depth == 1 {
        OPEN.with_borrow_mut(|open| {
            if let Some(open) = open
                && std::mem::take(&mut open.is_collecting)
                && let Some(telling) = open.context.telling()
            {
                telling.record(open.handle, State::GroupEndApiStart, 0);
            }
        });
    }
}

/// Called when the end of a group returns.
#[inline]
pub(crate) fn group_ended() {
    if IS_OPEN.get() && DEPTH.get() == 0 {
        close();
    }
}

#[cold]
fn close() {
    IS_OPEN.set(false);
    if let Some(mut open) = OPEN.take()
        && let Some(telling) = open.context.telling()
    {
        telling.stop(&mut open.handle);
    }
}
