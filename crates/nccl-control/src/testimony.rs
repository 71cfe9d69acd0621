//! How what a rank has heard goes over the wire to a successor, and back.

use super::frame::{Broken, Fields, put_bytes, put_index, put_number};
use super::mailbox::Notice;
use super::succession::{Loss, Report};
use crate::departure::{departure, lost, put_departure, put_lost};

pub(super) fn put_notices(to: &mut Vec<u8>, notices: &[Notice]) {
    put_index(to, notices.len());
    for notice in notices {
        match notice {
            Notice::Announced { from, topic, bytes } => {
                put_number(to, 0);
                put_index(to, *from);
                put_bytes(to, topic.as_bytes());
                put_bytes(to, bytes);
            }
            Notice::Gone { rank, departure } => {
                put_number(to, 1);
                put_index(to, *rank);
                put_departure(to, departure);
            }
            // Nobody tells another rank of it.
            Notice::CutOff { .. }
            | Notice::Told { .. }
            | Notice::Inquired { .. }
            | Notice::Late(_)
            | Notice::Skewed { .. } => put_number(to, 2),
        }
    }
}

pub(super) fn notices(fields: &mut Fields<'_>) -> Result<Vec<Notice>, Broken> {
    let count = fields.count(8)?;
    let notice = |_| {
        Ok(match fields.number()? {
            0 => Notice::Announced {
                from: fields.index()?,
                topic: fields.text()?,
                bytes: fields.bytes()?.into(),
            },
            1 => Notice::Gone {
                rank: fields.index()?,
                departure: departure(fields)?,
            },
            _ => return Err(Broken("a notice of an unknown kind")),
        })
    };
    (0..count).map(notice).collect()
}

pub(super) fn put_report(to: &mut Vec<u8>, report: &Report<Notice>) {
    put_index(to, report.synced);
    put_index(to, report.first);
    put_notices(to, &report.log);
    put_notices(to, &report.unheard);
    put_index(to, report.lost.len());
    for (rank, loss) in &report.lost {
        put_index(to, *rank);
        match loss {
            Loss::Lost(lost) => {
                put_number(to, 0);
                put_lost(to, lost);
            }
            Loss::Mute => put_number(to, 1),
            Loss::Elsewhere => put_number(to, 2),
            Loss::Left => put_number(to, 3),
        }
    }
}

pub(super) fn report(fields: &mut Fields<'_>) -> Result<Report<Notice>, Broken> {
    Ok(Report {
        synced: fields.index()?,
        first: fields.index()?,
        log: notices(fields)?,
        unheard: notices(fields)?,
        lost: (0..fields.count(16)?)
            .map(|_| {
                let rank = fields.index()?;
                let loss = match fields.number()? {
                    0 => Loss::Lost(lost(fields)?),
                    1 => Loss::Mute,
                    2 => Loss::Elsewhere,
                    3 => Loss::Left,
                    _ => return Err(Broken("a loss of an unknown kind")),
                };
                Ok((rank, loss))
            })
            .collect::<Result<_, Broken>>()?,
    })
}
