//! The number of public items of a crate.
//!
//! An item is a module, type, trait, macro, free function or constant that users can name, or an inherent method or associated
//! constant of such a type. Each counts once, whatever the number of its paths. Fields, variants and items of a trait do not
//! count: they are parts of an item.

use std::collections::BTreeSet;

use serde_json::Value;

/// Counts the items of a crate; its JSON includes the items of the workspace crates that it re-exports.
pub(super) fn items(json: &Value) -> usize {
    let mut counted = Counted {
        index: &json["index"],
        found: BTreeSet::new(),
    };
    counted.module(&json["root"]);
    counted.found.len()
}

struct Counted<'j> {
    index: &'j Value,
    found: BTreeSet<String>,
}

impl<'j> Counted<'j> {
    fn get(&self, id: &Value) -> Option<&'j Value> {
        self.index.get(id.to_string())
    }

    fn module(&mut self, id: &Value) {
        let items = self
            .get(id)
            .map(|module| &module["inner"]["module"]["items"]);
        for id in items.and_then(Value::as_array).into_iter().flatten() {
            self.item(id);
        }
    }

    fn item(&mut self, id: &Value) {
        let Some(item) = self.get(id) else { return };
        let inner = &item["inner"];
        if item["visibility"] != "public" || inner.get("impl").is_some() {
            return;
        }
        if let Some(import) = inner.get("use") {
            match (self.get(&import["id"]).is_some(), import["is_glob"] == true) {
                (true, true) => self.module(&import["id"]),
                (true, false) => self.item(&import["id"]),
                // An item of another crate.
                (false, _) => drop(self.found.insert(id.to_string())),
            }
            return;
        }
        if !self.found.insert(id.to_string()) {
            return;
        }
        if inner.get("module").is_some() {
            self.module(id);
        }
        for kind in ["struct", "enum", "union"] {
            let impls = inner.get(kind).and_then(|own| own["impls"].as_array());
            for id in impls.into_iter().flatten() {
                self.methods(id);
            }
        }
    }

    /// Counts the items of an inherent implementation.
    fn methods(&mut self, id: &Value) {
        let Some(own) = self.get(id).map(|item| &item["inner"]["impl"]) else {
            return;
        };
        if !own["trait"].is_null() {
            return;
        }
        for id in own["items"].as_array().into_iter().flatten() {
            if self
                .get(id)
                .is_some_and(|item| item["visibility"] == "public")
            {
                self.found.insert(id.to_string());
            }
        }
    }
}
