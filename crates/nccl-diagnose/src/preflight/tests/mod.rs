//! Made-up machines, and tests of the room as a whole.

mod codec;
mod random;

use super::facts::{Facts, Process};
use super::interfaces::Address;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A tree of files that looks like a machine's, as far as somebody has written it.
pub(super) struct Tree(PathBuf);

impl Tree {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nccl-preflight-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(path.join("dev/shm")).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(super) fn link(&self, path: &str, target: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Ranks that agree about everything, on these hosts.
pub(super) fn ranks_on(hosts: &[&str]) -> Vec<Facts> {
    hosts
        .iter()
        .enumerate()
        .map(|(rank, host)| Facts {
            protocol: super::facts::PROTOCOL,
            process: Some(Process {
                host: (*host).to_owned(),
                pid: 1000 + rank as u64,
                architecture: String::from("x86_64"),
                little_endian: true,
                boot: format!("boot of {host}"),
                ..Process::default()
            }),
            ..Facts::default()
        })
        .collect()
}

pub(super) fn with_addresses(facts: &mut Facts, addresses: &[(&str, &str)]) {
    let process = facts.process.as_mut().unwrap();
    let address = |&(interface, address): &(&str, &str)| Address {
        interface: interface.to_owned(),
        address: address.parse().unwrap(),
        prefix: 24,
        scope: 0,
        up: true,
    };
    process.addresses = addresses.iter().map(address).collect();
}
