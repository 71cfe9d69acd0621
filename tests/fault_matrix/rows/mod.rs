//! The rows, by the part that fails; and faults that are not tried here, with the reason.

mod deaths;
mod elsewhere;
mod messages;
mod network;
mod operations;
mod resources;
mod silence;
mod teardown;

use crate::row::{OnNvidias, Row};

/// A section of the page.
pub(crate) struct Section {
    title: &'static str,
    pub(crate) rows: &'static [Row],
    /// Faults that are tried elsewhere, or nowhere: the fault, and where or why not.
    elsewhere: &'static [(&'static str, &'static str)],
}

pub(crate) const SECTIONS: &[Section] = &[
    Section {
        title: "Before NCCL is up",
        rows: deaths::WHILE_STARTING,
        elsewhere: elsewhere::STARTING,
    },
    Section {
        title: "Processes that end",
        rows: deaths::ROWS,
        elsewhere: elsewhere::DEATHS,
    },
    Section {
        title: "Processes that live, and do not come",
        rows: silence::ROWS,
        elsewhere: elsewhere::SILENCE,
    },
    Section {
        title: "Collectives and CUDA",
        rows: operations::ROWS,
        elsewhere: elsewhere::OPERATIONS,
    },
    Section {
        title: "Messages and all-to-all",
        rows: messages::ROWS,
        elsewhere: elsewhere::MESSAGES,
    },
    Section {
        title: "Ends",
        rows: teardown::ROWS,
        elsewhere: elsewhere::TEARDOWN,
    },
    Section {
        title: "Settings of hosts",
        rows: &[],
        elsewhere: elsewhere::ENVIRONMENT,
    },
    Section {
        title: "Resources",
        rows: resources::ROWS,
        elsewhere: elsewhere::RESOURCES,
    },
    Section {
        title: "Network",
        rows: network::ROWS,
        elsewhere: elsewhere::NETWORK,
    },
];

/// The whole table, as in the page.
pub(crate) fn table() -> String {
    let mut text = String::new();
    for section in SECTIONS {
        text.push_str(&format!("\n## {}\n", section.title));
        if !section.rows.is_empty() {
            text.push_str(
                "\n| fault | who | what every rank that lives is told | within | usable afterwards: shown by | row |\n\
                 |---|---|---|---|---|---|\n",
            );
            for row in section.rows {
                text.push_str(&row.line());
                text.push('\n');
            }
        }
        if !section.elsewhere.is_empty() {
            text.push_str("\n| fault | where it is tried, or why not |\n|---|---|\n");
            for (fault, where_or_why) in section.elsewhere {
                text.push_str(&format!("| {fault} | {where_or_why} |\n"));
            }
        }
    }
    text.push_str("\n## On NVIDIA's own library\n\n| row | there |\n|---|---|\n");
    for row in SECTIONS.iter().flat_map(|section| section.rows) {
        match row.on_nvidias {
            OnNvidias::Same => {}
            OnNvidias::MismatchField(how) => {
                text.push_str(&format!("| `{}` | {how} |\n", row.name))
            }
            OnNvidias::NotTried(why) => {
                text.push_str(&format!("| `{}` | not tried: {why} |\n", row.name));
            }
        }
    }
    text.push('\n');
    text
}
