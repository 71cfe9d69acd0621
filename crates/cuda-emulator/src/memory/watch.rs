//! Ranges of device memory whose use by work of this process is reported: memory into which other ranks write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::span::Span;
use crate::sync::RwLock;

type Report = Arc<dyn Fn(&Span) + Send + Sync>;

struct Watched {
    number: u64,
    token: u128,
    span: Span,
    report: Report,
}

impl Watched {
    fn is(&self, token: u128, span: &Span) -> bool {
        self.token == token && self.span.overlaps(span)
    }
}

/// The number of watched ranges, so that other memory costs a load.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static WATCHED: RwLock<Vec<Watched>> = RwLock::new(Vec::new());

/// A watched range. Dropping this value ends the reports.
#[derive(Debug)]
pub struct Watch(u64);

impl Watch {
    pub(super) fn new(
        token: u128,
        span: Span,
        report: impl Fn(&Span) + Send + Sync + 'static,
    ) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        WATCHED.write().push(Watched {
            number,
            token,
            span,
            report: Arc::new(report),
        });
        COUNT.fetch_add(1, Ordering::Release);
        Self(number)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Release);
        WATCHED.write().retain(|watched| watched.number != self.0);
    }
}

/// Reports the use of `span` of the pool with this token.
pub(super) fn used(token: u128, span: &Span) {
    if COUNT.load(Ordering::Acquire) != 0 {
        report(token, span);
    }
}

/// Whether bytes of `span` are watched.
pub(super) fn is_watched(token: u128, span: &Span) -> bool {
    COUNT.load(Ordering::Acquire) != 0
        && WATCHED.read().iter().any(|watched| watched.is(token, span))
}

#[cold]
fn report(token: u128, span: &Span) {
    let watched = WATCHED.read();
    let reports = watched.iter().filter(|watched| watched.is(token, span));
    let reports: Vec<Report> = reports.map(|watched| Arc::clone(&watched.report)).collect();
    // A report may use memory, too.
    drop(watched);
    reports.iter().for_each(|report| report(span));
}
