//! How a departure goes over the wire, and back.

use std::time::Duration;

use super::{
    Departure, Exit, Failure, HeardOnly, How, LastCall, Lost, OomKill, ProcessEnd, Sign, Signal,
    Silence, Told,
};
use crate::codec::{Broken, Fields, put_bytes, put_index, put_number};

#[doc(hidden)]
pub fn put_departure(to: &mut Vec<u8>, departure: &Departure) {
    match departure {
        Departure::Left => put_number(to, 0),
        Departure::Failed(failure) => {
            put_number(to, 1);
            put_failure(to, failure);
        }
        Departure::Lost(lost) => {
            put_number(to, 2);
            put_lost(to, lost);
        }
    }
}

#[doc(hidden)]
pub fn departure(fields: &mut Fields<'_>) -> Result<Departure, Broken> {
    Ok(match fields.number()? {
        0 => Departure::Left,
        1 => Departure::Failed(failure(fields)?),
        2 => Departure::Lost(lost(fields)?),
        _ => return Err(Broken("a departure of an unknown kind")),
    })
}

#[doc(hidden)]
pub fn put_failure(to: &mut Vec<u8>, failure: &Failure) {
    match failure {
        Failure::Said(chain) => {
            put_number(to, 0);
            put_bytes(to, chain.as_bytes());
        }
        Failure::Exits(status) => {
            put_number(to, 1);
            put_signed(to, *status);
        }
    }
}

#[doc(hidden)]
pub fn failure(fields: &mut Fields<'_>) -> Result<Failure, Broken> {
    Ok(match fields.number()? {
        0 => Failure::Said(fields.said()?),
        1 => Failure::Exits(signed(fields)?),
        _ => return Err(Broken("a failure of an unknown kind")),
    })
}

#[doc(hidden)]
pub fn put_lost(to: &mut Vec<u8>, lost: &Lost) {
    match &lost.how {
        How::Ended(end) => {
            put_number(to, 0);
            put_process_end(to, end);
        }
        How::Closed => put_number(to, 1),
        How::Orphaned { pid } => {
            put_number(to, 2);
            put_number(to, *pid);
        }
        How::Exited { pid } => {
            put_number(to, 13);
            put_number(to, *pid);
        }
        How::NobodyListens => put_number(to, 3),
        How::Replaced { by } => {
            put_number(to, 4);
            put_index(to, *by);
        }
        How::NoAddress => put_number(to, 5),
        How::Sent(what) => put_text(to, 6, what),
        How::LeftBehind { after } => {
            put_number(to, 7);
            put_time(to, *after);
        }
        How::PassedOver => put_number(to, 8),
        How::CutOff(why) => put_text(to, 9, why),
        How::Unknown => put_number(to, 10),
        How::Said(text) => put_text(to, 11, text),
        How::Silent(silence) => {
            put_number(to, 12);
            put_silence(to, silence);
        }
    }
    put_option(to, lost.last_call.as_ref(), |to, last| {
        put_bytes(to, last.call.as_bytes());
        put_time(to, last.before);
    });
}

#[doc(hidden)]
pub fn lost(fields: &mut Fields<'_>) -> Result<Lost, Broken> {
    let how = match fields.number()? {
        0 => How::Ended(Box::new(process_end(fields)?)),
        1 => How::Closed,
        2 => How::Orphaned {
            pid: fields.number()?,
        },
        3 => How::NobodyListens,
        4 => How::Replaced {
            by: fields.index()?,
        },
        5 => How::NoAddress,
        6 => How::Sent(fields.said()?),
        7 => How::LeftBehind {
            after: time(fields)?,
        },
        8 => How::PassedOver,
        9 => How::CutOff(fields.said()?),
        10 => How::Unknown,
        11 => How::Said(fields.said()?),
        12 => How::Silent(Box::new(silence(fields)?)),
        13 => How::Exited {
            pid: fields.number()?,
        },
        _ => return Err(Broken("a loss of an unknown kind")),
    };
    let last_call = option(fields, |fields| {
        Ok(LastCall {
            call: fields.said()?,
            before: time(fields)?,
        })
    })?;
    Ok(Lost { how, last_call })
}

fn put_silence(to: &mut Vec<u8>, silence: &Silence) {
    match &silence.sign {
        Sign::Error(error) => put_text(to, 0, error),
        Sign::GaveUp { unacknowledged } => {
            put_number(to, 1);
            put_time(to, *unacknowledged);
        }
        Sign::Unheard {
            unheard,
            unacknowledged,
        } => {
            put_number(to, 2);
            put_time(to, *unheard);
            put_time(to, *unacknowledged);
        }
    }
    put_option(to, silence.heard.as_ref(), |to, heard| {
        put_time(to, heard.heard);
        put_time(to, heard.unacknowledged);
    });
    put_option(to, silence.undecided.as_ref(), |to, why| {
        put_bytes(to, why.as_bytes());
    });
}

fn silence(fields: &mut Fields<'_>) -> Result<Silence, Broken> {
    let sign = match fields.number()? {
        0 => Sign::Error(fields.said()?),
        1 => Sign::GaveUp {
            unacknowledged: time(fields)?,
        },
        2 => Sign::Unheard {
            unheard: time(fields)?,
            unacknowledged: time(fields)?,
        },
        _ => return Err(Broken("a silence of an unknown kind")),
    };
    Ok(Silence {
        sign,
        heard: option(fields, |fields| {
            Ok(HeardOnly {
                heard: time(fields)?,
                unacknowledged: time(fields)?,
            })
        })?,
        undecided: option(fields, Fields::said)?,
    })
}

#[doc(hidden)]
pub fn put_process_end(to: &mut Vec<u8>, end: &ProcessEnd) {
    match &end.told {
        Told::Seen { exit, sent, oom } => {
            put_number(to, 0);
            put_exit(to, *exit);
            put_option(to, sent.as_ref(), |to, sent| put_signed(to, sent.number()));
            put_option(to, oom.as_ref(), |to, oom| {
                put_bytes(to, oom.group.as_bytes());
                put_number(to, oom.killed);
                put_option(to, oom.limit.as_ref(), |to, limit| put_number(to, *limit));
            });
        }
        Told::Words {
            words,
            exit,
            out_of_memory,
        } => {
            put_text(to, 1, words);
            put_option(to, exit.as_ref(), |to, exit| put_exit(to, *exit));
            put_number(to, (*out_of_memory).into());
        }
    }
    put_option(to, end.stderr.as_ref(), |to, stderr| {
        put_bytes(to, stderr.as_bytes());
    });
}

#[doc(hidden)]
pub fn process_end(fields: &mut Fields<'_>) -> Result<ProcessEnd, Broken> {
    let told = match fields.number()? {
        0 => Told::Seen {
            exit: exit(fields)?,
            sent: option(fields, |fields| Ok(Signal::new(signed(fields)?)))?,
            oom: option(fields, |fields| {
                Ok(OomKill {
                    group: fields.said()?,
                    killed: fields.number()?,
                    limit: option(fields, Fields::number)?,
                })
            })?,
        },
        1 => Told::Words {
            words: fields.said()?,
            exit: option(fields, exit)?,
            out_of_memory: yes(fields)?,
        },
        _ => return Err(Broken("the end of a process of an unknown kind")),
    };
    Ok(ProcessEnd {
        told,
        stderr: option(fields, Fields::said)?,
    })
}

fn put_exit(to: &mut Vec<u8>, exit: Exit) {
    match exit {
        Exit::Code(code) => {
            put_number(to, 0);
            put_signed(to, code);
        }
        Exit::Signal {
            signal,
            core_dumped,
        } => {
            put_number(to, 1);
            put_signed(to, signal.number());
            put_number(to, core_dumped.into());
        }
        Exit::Unknown => put_number(to, 2),
    }
}

fn exit(fields: &mut Fields<'_>) -> Result<Exit, Broken> {
    Ok(match fields.number()? {
        0 => Exit::Code(signed(fields)?),
        1 => Exit::Signal {
            signal: Signal::new(signed(fields)?),
            core_dumped: yes(fields)?,
        },
        2 => Exit::Unknown,
        _ => return Err(Broken("an exit of an unknown kind")),
    })
}

fn put_text(to: &mut Vec<u8>, kind: u64, text: &str) {
    put_number(to, kind);
    put_bytes(to, text.as_bytes());
}

fn put_option<T>(to: &mut Vec<u8>, value: Option<&T>, put: impl FnOnce(&mut Vec<u8>, &T)) {
    put_number(to, value.is_some().into());
    if let Some(value) = value {
        put(to, value);
    }
}

fn option<'f, T>(
    fields: &mut Fields<'f>,
    take: impl FnOnce(&mut Fields<'f>) -> Result<T, Broken>,
) -> Result<Option<T>, Broken> {
    match yes(fields)? {
        true => take(fields).map(Some),
        false => Ok(None),
    }
}

fn yes(fields: &mut Fields<'_>) -> Result<bool, Broken> {
    match fields.number()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Broken("what is neither yes nor no")),
    }
}

fn put_signed(to: &mut Vec<u8>, number: i32) {
    put_number(to, i64::from(number) as u64);
}

fn signed(fields: &mut Fields<'_>) -> Result<i32, Broken> {
    i32::try_from(fields.number()? as i64).map_err(|_| Broken("a number that is too large"))
}

/// In nanoseconds: what is shown is rounded alike on all ranks.
fn put_time(to: &mut Vec<u8>, time: Duration) {
    put_number(to, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

fn time(fields: &mut Fields<'_>) -> Result<Duration, Broken> {
    Ok(Duration::from_nanos(fields.number()?))
}
