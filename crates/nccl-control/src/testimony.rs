//! How what a rank has heard goes over the wire to a successor, and back.

use super::frame::{Broken, Fields, put_bytes, put_index, put_number};
use super::mailbox::Notice;
use super::message::{departure, put_departure};
use super::succession::{Loss, Report};

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
        let (kind, text) = match loss {
            Loss::Told(how) => (0, &how[..]),
            Loss::Closed(how) => (1, &how[..]),
            Loss::Silent(how) => (2, &how[..]),
            Loss::Mute => (3, ""),
            Loss::Elsewhere => (4, ""),
            Loss::Left => (5, ""),
        };
        put_index(to, *rank);
        put_number(to, kind);
        put_bytes(to, text.as_bytes());
    }
}

pub(super) fn report(fields: &mut Fields<'_>) -> Result<Report<Notice>, Broken> {
    Ok(Report {
        synced: fields.index()?,
        first: fields.index()?,
        log: notices(fields)?,
        unheard: notices(fields)?,
        lost: (0..fields.count(24)?)
            .map(|_| {
                let rank = fields.index()?;
                let kind = fields.number()?;
                let how = fields.said()?;
                let loss = match kind {
                    0 => Loss::Told(how),
                    1 => Loss::Closed(how),
                    2 => Loss::Silent(how),
                    3 => Loss::Mute,
                    4 => Loss::Elsewhere,
                    5 => Loss::Left,
                    _ => return Err(Broken("a loss of an unknown kind")),
                };
                Ok((rank, loss))
            })
            .collect::<Result<_, Broken>>()?,
    })
}
