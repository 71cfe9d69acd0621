//! Which file uses which.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{File, Sources};

pub(super) struct Graph {
    /// The rooms of the files: the first part of their module, or the file's own name in the root.
    room_of: Vec<String>,
    paths: Vec<String>,
    /// For each file those that it uses.
    uses: Vec<BTreeSet<usize>>,
}

/// How often a name is followed from one `use` to the next.
const HOPS: u32 = 8;

pub(super) fn of(sources: &Sources) -> Graph {
    let files = &sources.files;
    let by_module: BTreeMap<&[String], usize> = files
        .iter()
        .enumerate()
        .map(|(at, file)| (&file.module[..], at))
        .collect();
    let uses = files
        .iter()
        .enumerate()
        .map(|(at, file)| {
            let named = file.imports.values().chain(&file.paths).chain(&file.globs);
            let mut used: BTreeSet<usize> = named
                .filter_map(|path| resolve(files, &by_module, path, HOPS))
                .collect();
            used.remove(&at);
            used
        })
        .collect();
    let room = |file: &File| file.module.first().cloned().unwrap_or_default();
    Graph {
        room_of: files.iter().map(room).collect(),
        paths: files.iter().map(|file| file.path.clone()).collect(),
        uses,
    }
}

/// The file that defines what a path names.
fn resolve(
    files: &[File],
    by_module: &BTreeMap<&[String], usize>,
    path: &[String],
    hops: u32,
) -> Option<usize> {
    let mut depth = path.len();
    let at = loop {
        match by_module.get(&path[..depth]) {
            Some(&at) if depth > 0 => break at,
            _ if depth == 0 => break 0,
            _ => depth -= 1,
        }
    };
    let Some(name) = path.get(depth) else {
        return Some(at);
    };
    let file = &files[at];
    if hops > 0 {
        if let Some(import) = file.imports.get(name)
            && import[..] != *path
        {
            let mut further = import.clone();
            further.extend_from_slice(&path[depth + 1..]);
            return resolve(files, by_module, &further, hops - 1);
        }
        // A name that nothing brings in is the file's own, or of a glob that has it.
        for glob in &file.globs {
            if let Some(&other) = by_module.get(&glob[..])
                && files[other].imports.contains_key(name)
            {
                let mut further = glob.clone();
                further.extend_from_slice(&path[depth..]);
                return resolve(files, by_module, &further, hops - 1);
            }
        }
    }
    // In the root, what is no module of the crate's is another crate, or a macro.
    (depth > 0).then_some(at)
}

impl Graph {
    pub(super) fn rooms(&self) -> usize {
        self.names().len()
    }

    fn names(&self) -> BTreeSet<&str> {
        let rooms = self.room_of.iter().map(String::as_str);
        rooms.filter(|room| !room.is_empty()).collect()
    }

    /// Rooms that use each other in circles.
    pub(super) fn rooms_in_knots(&self) -> Vec<Vec<String>> {
        let names: Vec<&str> = self.names().into_iter().collect();
        let number = |room: &str| names.binary_search(&room).ok();
        let mut uses = vec![BTreeSet::new(); names.len()];
        for (at, used) in self.uses.iter().enumerate() {
            let Some(from) = number(&self.room_of[at]) else {
                continue;
            };
            let to = used
                .iter()
                .filter_map(|&other| number(&self.room_of[other]));
            uses[from].extend(to.filter(|&to| to != from));
        }
        named(tied(&uses), |at| names[at].to_owned())
    }

    /// Files that use each other in circles.
    pub(super) fn circles(&self) -> Vec<Vec<String>> {
        named(tied(&self.uses), |at| self.paths[at].clone())
    }
}

fn named(groups: Vec<Vec<usize>>, name: impl Fn(usize) -> String) -> Vec<Vec<String>> {
    let name = &name;
    groups
        .into_iter()
        .map(|group| group.into_iter().map(name).collect())
        .collect()
}

/// The strongly connected components of more than one node.
fn tied(uses: &[BTreeSet<usize>]) -> Vec<Vec<usize>> {
    let mut order = Vec::new();
    let mut seen = vec![false; uses.len()];
    for start in 0..uses.len() {
        let mut stack = vec![(start, false)];
        while let Some((at, is_done)) = stack.pop() {
            if is_done {
                order.push(at);
            } else if !std::mem::replace(&mut seen[at], true) {
                stack.push((at, true));
                stack.extend(uses[at].iter().map(|&next| (next, false)));
            }
        }
    }
    let mut used_by = vec![Vec::new(); uses.len()];
    for (at, used) in uses.iter().enumerate() {
        for &other in used {
            used_by[other].push(at);
        }
    }
    let mut groups = Vec::new();
    let mut taken = vec![false; uses.len()];
    for &start in order.iter().rev() {
        let (mut group, mut stack) = (Vec::new(), vec![start]);
        while let Some(at) = stack.pop() {
            if !std::mem::replace(&mut taken[at], true) {
                group.push(at);
                stack.extend(&used_by[at]);
            }
        }
        if group.len() > 1 {
            group.sort_unstable();
            groups.push(group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_tied_in_circles_is_found() {
        let uses = [
            [1].into(),
            [2].into(),
            [0, 3].into(),
            [4].into(),
            BTreeSet::new(),
        ];
        assert_eq!(tied(&uses), [vec![0, 1, 2]]);
        assert!(tied(&[[1].into(), BTreeSet::new()]).is_empty());
    }
}
