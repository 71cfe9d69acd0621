//! The span of the program in which a call was made, which distinguishes the requests or steps of the program.
//!
//! A call records only a number and the index of a name, and only if a subscriber is set; without one, the cost is the
//! load of one word, [`LevelFilter::current`]. Only the subscriber knows a span's fields, so the program may register a
//! function that describes spans ([`describe_spans`]), which is called when a recording is read.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tracing::Metadata;
use tracing::level_filters::LevelFilter;

use super::fields;
use super::notes::cut;
use crate::sync::{Mutex, MutexGuard};

/// The `tracing` span in which a call was made.
///
/// ```
/// for communicator in nccl::recorder::snapshot().communicators {
///     for call in communicator.calls {
///         if let Some(span) = call.span {
///             println!("{} #{} in {} {}", call.kind, call.sequence, span.name, span.about.unwrap_or_default());
///         }
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CallSpan {
    /// The span's number in the subscriber
    /// ([`tracing::Id`](https://docs.rs/tracing/0.1/tracing/span/struct.Id.html)).
    #[serde(with = "fields::handle")]
    pub id: u64,
    /// The span's name.
    pub name: String,
    /// The program's description of the span ([`describe_spans`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
}

/// The maximum number of spans that are distinguished by name. A program has one for each place where it makes spans.
const NAMES: usize = 1 << 16;

/// How many bytes of a description are kept.
const LONGEST: usize = 512;

/// A span as a call records it: its number, and the index of its name, from 1. Both are 0 for none.
#[derive(Clone, Copy, Default)]
pub(super) struct SpanRef {
    pub(super) id: u64,
    pub(super) name: u32,
}

/// The current span of this thread.
#[inline]
pub(super) fn current() -> SpanRef {
    match LevelFilter::current() {
        LevelFilter::OFF => SpanRef::default(),
        _ => ask(),
    }
}

/// Allocates only for a span whose place in the program is new.
#[inline(never)]
fn ask() -> SpanRef {
    tracing::dispatcher::get_default(|subscriber| {
        let span = subscriber.current_span();
        match (span.id(), span.metadata()) {
            (Some(id), Some(metadata)) => SpanRef {
                id: id.into_u64(),
                name: place(metadata),
            },
            _ => SpanRef::default(),
        }
    })
}

fn names() -> MutexGuard<'static, Vec<&'static Metadata<'static>>> {
    static NAMES: Mutex<Vec<&'static Metadata<'static>>> = Mutex::new(Vec::new());
    NAMES.lock()
}

/// Returns the index at which the name of a span with this metadata is kept.
fn place(metadata: &'static Metadata<'static>) -> u32 {
    thread_local! {
        /// The last result for this thread; most calls of a thread are made at one place.
        static LAST: Cell<(usize, u32)> = const { Cell::new((0, 0)) };
    }
    let address = std::ptr::from_ref(metadata).addr();
    let (last, place) = LAST.get();
    if last == address {
        return place;
    }
    let mut names = names();
    let known = names
        .iter()
        .position(|known| std::ptr::eq(*known, metadata));
    let at = known.unwrap_or_else(|| {
        if names.len() < NAMES {
            names.push(metadata);
        }
        names.len() - 1
    });
    let place = at as u32 + 1;
    LAST.set((address, place));
    place
}

/// The program's function that describes a span.
type Describe = Arc<dyn Fn(u64) -> Option<String> + Send + Sync>;

fn describer() -> MutexGuard<'static, Option<Describe>> {
    static DESCRIBE: Mutex<Option<Describe>> = Mutex::new(None);
    DESCRIBE.lock()
}

/// Sets the function that describes the spans in which calls are made. Its argument is the number that the subscriber
/// gave the span.
///
/// A recording then shows the request or step in which a call was made, and not only the kind of span. The function is
/// called when a recording is made, on the thread that makes it, for spans that may have ended long ago. It must not
/// wait, and must not call NCCL. A later function replaces an earlier one. Its result is cut off after 512 bytes, and
/// if it panics, the span is not described.
///
/// With tracing-subscriber's registry, layers keep their data about a span in its extensions
/// (`examples/observability/opentelemetry.rs` is a whole program):
///
/// ```ignore
/// let registry = tracing::dispatcher::get_default(Clone::clone);
/// nccl::recorder::describe_spans(move |id| {
///     let registry = registry.downcast_ref::<tracing_subscriber::Registry>()?;
///     let span = registry.span(&tracing::Id::from_u64(id))?;
///     let extensions = span.extensions();
///     Some(extensions.get::<MyFields>()?.to_string())
/// });
/// ```
pub fn describe_spans(describe: impl Fn(u64) -> Option<String> + Send + Sync + 'static) {
    let before = describer().replace(Arc::new(describe));
    // Dropped after the lock is released, because dropping the old function may run any code.
    drop(before);
}

/// Reads the spans that calls have recorded; each span is described once.
#[derive(Default)]
pub(super) struct SpanReader(Vec<(u64, Option<String>)>);

impl SpanReader {
    pub(super) fn read(&mut self, mention: SpanRef) -> Option<CallSpan> {
        let at = usize::try_from(mention.name).ok()?.checked_sub(1)?;
        let name = names().get(at)?.name().to_owned();
        let id = mention.id;
        let known = self.0.iter().rev().find(|(known, _)| *known == id);
        let about = match known {
            Some((_, about)) => about.clone(),
            None => {
                let about = describe(id);
                self.0.push((id, about.clone()));
                about
            }
        };
        Some(CallSpan { id, name, about })
    }
}

fn describe(id: u64) -> Option<String> {
    let describe = describer().clone()?;
    // This is the program's code. Its panic must not end the thread that answers other ranks.
    let about = catch_unwind(AssertUnwindSafe(|| describe(id))).ok()??;
    Some(cut(&about, LONGEST).to_owned())
}
