//! Joins the JSON of several crates into one, in which an item is the same wherever it is defined.
//!
//! Every crate numbers its own items, and the items of other crates that it mentions. [`join`] renumbers the items of all
//! crates, and gives all mentions of an item the same number. Then it makes modules uniform: each contains only re-exports,
//! sorted by name. For an item with several paths, `public-api` prefers a path without a re-export, and a move can change which
//! one that is; among re-exports it takes the shortest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::{Map, Value, json};

use super::document::{Documented, Json};
use crate::Result;

type Id = u64;

/// The keys of lists whose numbers are items.
const LISTS: &[&str] = &[
    "fields",
    "implementations",
    "impls",
    "items",
    "tuple",
    "variants",
];

/// Traits that stable Rust cannot name, so that their implementation promises nothing.
const UNSTABLE: &[&str] = &["Freeze", "StructuralPartialEq", "UnsafeUnpin"];

/// Joins the JSON of the crate `own` with that of the crates that its items may come from. `others` are the listed crates that
/// it depends on, in the order in which their paths are preferred for types.
pub(super) fn join(own: &Documented, others: &[&Documented]) -> Result<Value> {
    let mut crates = vec![&own.own];
    crates.extend(others.iter().map(|other| &other.own));
    // A part of several listed crates has the features that this crate requests of it.
    let parts = others.iter().flat_map(|other| &other.parts);
    for part in own.parts.iter().chain(parts) {
        if crates.iter().all(|known| name(known) != name(part)) {
            crates.push(part);
        }
    }
    let mut joined = Joined::of(&crates)?;
    joined.drop_unstable();
    joined.level_modules();
    joined.name_by_public_paths();
    Ok(json!({
        "root": joined.roots[0].0,
        "crate_version": null,
        "includes_private": false,
        "index": by_text(joined.index),
        "paths": by_text(joined.paths),
        "external_crates": {},
        "target": own.own.value["target"],
        "format_version": own.own.value["format_version"],
    }))
}

/// The name of a crate.
fn name(json: &Json) -> Option<&str> {
    let root = json.value["root"].as_u64()?;
    json.value["index"][root.to_string()]["name"].as_str()
}

fn by_text(map: BTreeMap<Id, Value>) -> Map<String, Value> {
    let text = |(id, value): (Id, Value)| (id.to_string(), value);
    map.into_iter().map(text).collect()
}

fn by_number(value: &Value) -> Result<BTreeMap<Id, &Value>> {
    let map = value
        .as_object()
        .ok_or("rustdoc's JSON lacks a table of items")?;
    map.iter()
        .map(|(id, value)| Ok((id.parse()?, value)))
        .collect()
}

struct Joined {
    index: BTreeMap<Id, Value>,
    paths: BTreeMap<Id, Value>,
    /// The root modules of the crates, and whether each has a list of its own.
    roots: Vec<(Id, bool)>,
    /// The items of the crates; only these are renamed.
    defined: BTreeSet<Id>,
    next: Id,
}

impl Joined {
    fn of(crates: &[&Json]) -> Result<Self> {
        let mut next = 0;
        let mut tables = Vec::new();
        // By path and kind: a function may have the name of a module.
        let mut definitions = BTreeMap::new();
        for json in crates {
            let index = by_number(&json.value["index"])?;
            let paths = by_number(&json.value["paths"])?;
            for (id, summary) in &paths {
                if summary["crate_id"] == 0 {
                    definitions.insert(definition(summary), next + id);
                }
            }
            let last = index.keys().chain(paths.keys()).max().copied();
            let first = next;
            next += last.unwrap_or(0) + 1;
            tables.push((json, first, index, paths));
        }
        let mut joined = Self {
            index: BTreeMap::new(),
            paths: BTreeMap::new(),
            roots: Vec::new(),
            defined: definitions.values().copied().collect(),
            next,
        };
        for (json, first, index, paths) in tables {
            let number = |id: Id| {
                let known = paths.get(&id);
                let known = known.and_then(|summary| definitions.get(&definition(summary)));
                known.copied().unwrap_or(first + id)
            };
            let root = json.value["root"].as_u64();
            let root = root.ok_or("rustdoc's JSON lacks a root")?;
            joined.roots.push((number(root), json.is_listed));
            for (&id, &item) in &index {
                if number(id) == first + id {
                    let mut item = item.clone();
                    item["docs"] = Value::Null;
                    item["links"] = json!({});
                    renumber(&mut item, &number);
                    joined.index.insert(first + id, item);
                }
            }
            for (&id, &summary) in &paths {
                if number(id) == first + id {
                    joined.paths.insert(first + id, summary.clone());
                }
            }
        }
        Ok(joined)
    }

    /// Returns the entries of a public module: names, with their items or re-exports. `open` are the modules being visited.
    fn entries(&self, module: Id, open: &mut Vec<Id>) -> BTreeSet<(String, Id)> {
        let mut entries = BTreeSet::new();
        if open.contains(&module) {
            return entries;
        }
        open.push(module);
        for id in self.children(module) {
            let Some(item) = self.index.get(&id) else {
                continue;
            };
            let used = &item["inner"]["use"];
            let target = used["id"].as_u64().filter(|&target| self.is_here(target));
            match target {
                Some(target) if used["is_glob"] == true => {
                    entries.extend(self.entries(target, open));
                }
                Some(target) => {
                    entries.insert((text(&used["name"]), target));
                }
                None if used.is_object() => {
                    entries.insert((text(&used["name"]), id));
                }
                None => {
                    entries.insert((text(&item["name"]), id));
                }
            }
        }
        open.pop();
        entries
    }

    /// The items of a module, or the variants of an enum.
    fn children(&self, id: Id) -> Vec<Id> {
        let inner = self.index.get(&id).map(|item| &item["inner"]);
        let lists = inner.map(|inner| [&inner["module"]["items"], &inner["enum"]["variants"]]);
        let numbers = lists.into_iter().flatten().filter_map(Value::as_array);
        numbers.flatten().filter_map(Value::as_u64).collect()
    }

    /// Whether a re-exported item is shown in place of its re-export.
    fn is_here(&self, id: Id) -> bool {
        self.index.contains_key(&id) && !self.roots.contains(&(id, true))
    }

    /// Turns all entries of modules into re-exports, sorted by name.
    fn level_modules(&mut self) {
        let is_module = |(_, item): &(&Id, &Value)| item["inner"]["module"].is_object();
        let modules = self.index.iter().filter(is_module);
        let modules: Vec<Id> = modules.map(|(&id, _)| id).collect();
        let mut level = Vec::new();
        for &module in &modules {
            level.push((module, self.entries(module, &mut Vec::new())));
        }
        for (module, entries) in level {
            let mut items = Vec::new();
            for (name, id) in entries {
                let Some(item) = self.index.get_mut(&id) else {
                    continue;
                };
                let is_use = item["inner"]["use"].is_object();
                if is_use {
                    // The target becomes null, so that this is one line, even if the target is the root of a crate that is here
                    // for its types.
                    item["inner"]["use"]["id"] = Value::Null;
                }
                // No path leads to an item without a name.
                if is_use || name.is_empty() {
                    items.push(id);
                } else {
                    items.push(self.next);
                    let used = re_export(self.next, &name, id);
                    self.index.insert(self.next, used);
                    self.next += 1;
                }
            }
            if let Some(item) = self.index.get_mut(&module) {
                item["inner"]["module"]["items"] = json!(items);
            }
        }
    }

    /// Replaces the paths of types in signatures by public ones. Modules are level by then.
    fn name_by_public_paths(&mut self) {
        let mut named: BTreeMap<Id, Vec<String>> = BTreeMap::new();
        for &(root, is_listed) in &self.roots {
            if is_listed {
                for (id, path) in self.public_paths(root) {
                    named.entry(id).or_insert(path);
                }
            }
        }
        for (id, summary) in &mut self.paths {
            if !self.defined.contains(id) {
                continue;
            }
            let path = match named.get(id) {
                Some(path) => json!(path),
                None => json!(definition(summary).0.last().as_slice()),
            };
            summary["path"] = path;
        }
    }

    /// The shortest public path of each item that a crate exports.
    fn public_paths(&self, root: Id) -> BTreeMap<Id, Vec<String>> {
        let own = vec![text(&self.index[&root]["name"])];
        let mut found = BTreeMap::from([(root, own.clone())]);
        let mut left = VecDeque::from([(root, own)]);
        while let Some((module, path)) = left.pop_front() {
            for child in self.children(module) {
                let used = &self.index[&child]["inner"]["use"];
                let Some(target) = used["id"].as_u64().filter(|&id| self.is_here(id)) else {
                    continue;
                };
                if found.contains_key(&target) {
                    continue;
                }
                let path = [&path[..], &[text(&used["name"])]].concat();
                found.insert(target, path.clone());
                if self.index[&target]["inner"]["module"].is_object() {
                    left.push_back((target, path));
                }
            }
        }
        found
    }

    /// Removes implementations of traits that are not stable.
    fn drop_unstable(&mut self) {
        let paths = &self.paths;
        self.index.retain(|_, item| {
            let of = item["inner"]["impl"]["trait"]["id"].as_u64();
            let path = of.and_then(|id| paths.get(&id)?["path"].as_array());
            !path.is_some_and(|path| match &path[..] {
                [first, .., last] => {
                    first == "core" && UNSTABLE.iter().any(|unstable| last == unstable)
                }
                _ => false,
            })
        });
    }
}

/// The path of an item where it is defined, and its kind.
fn definition(summary: &Value) -> (Vec<String>, String) {
    let path = summary["path"].as_array();
    let path = path.into_iter().flatten().map(text).collect();
    (path, text(&summary["kind"]))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn re_export(own: Id, name: &str, id: Id) -> Value {
    json!({
        "id": own,
        "crate_id": 0,
        "name": null,
        "span": null,
        "visibility": "public",
        "docs": null,
        "links": {},
        "attrs": [],
        "deprecation": null,
        "inner": { "use": { "source": name, "name": name, "id": id, "is_glob": false } },
    })
}

/// Renumbers the items mentioned in a part of the JSON. A path from the source is reduced to its name: otherwise it would show
/// the module and crate of the source.
fn renumber(value: &mut Value, number: &impl Fn(Id) -> Id) {
    let change = |value: &mut Value| match value.as_u64() {
        Some(id) => *value = json!(number(id)),
        None => renumber(value, number),
    };
    match value {
        Value::Object(map) => {
            let is_path = map.get("id").is_some_and(Value::is_u64);
            for (key, value) in map {
                match value {
                    Value::String(path) if is_path && key == "path" => {
                        *path = path.rsplit("::").next().unwrap_or_default().to_owned();
                    }
                    Value::Array(items) if LISTS.contains(&key.as_str()) => {
                        items.iter_mut().for_each(change);
                    }
                    _ if key == "id" => change(value),
                    _ => renumber(value, number),
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                renumber(item, number);
            }
        }
        _ => {}
    }
}
