//! The log entries that the page lists.

use std::collections::{BTreeMap, BTreeSet};

use crate::page::{quoted, rows};

/// The levels and fields of one name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) levels: BTreeSet<String>,
    pub(super) fields: BTreeSet<String>,
}

pub(super) type Table = BTreeMap<String, Entry>;

/// The log entries that the page lists.
pub(super) fn listed() -> Table {
    let mut table = Table::new();
    for row in rows("nccl.") {
        let [name, levels, fields, ..] = row[..] else {
            panic!("a row has four cells: {row:?}");
        };
        let name = quoted(name).next().unwrap().to_owned();
        let entry = Entry {
            levels: levels
                .split(", ")
                .map(|level| level.trim().to_owned())
                .collect(),
            fields: quoted(fields).map(str::to_owned).collect(),
        };
        assert!(table.insert(name.clone(), entry).is_none(), "{name} twice");
    }
    table
}
