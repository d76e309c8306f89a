use std::collections::{BTreeMap, BTreeSet};

use rattler_conda_types::{PackageName, PackageRecord};

/// Sorts records so that each stands after what it depends on; among those that could come next, by name.
///
/// Circles (`python` and `pip` need each other in old records) are broken at `python` where it is part of one, else at
/// the first name. Names that occur twice keep their order. Takes time linear in records and dependencies, apart from
/// circles, and no recursion: malformed records cannot exhaust the stack.
pub fn topological<T: AsRef<PackageRecord>>(mut records: Vec<T>) -> Vec<T> {
    records.sort_by(|a, b| a.as_ref().name.as_normalized().cmp(b.as_ref().name.as_normalized()));
    let mut index: BTreeMap<String, usize> = BTreeMap::new();
    for (position, record) in records.iter().enumerate() {
        index.entry(record.as_ref().name.as_normalized().to_owned()).or_insert(position);
    }
    let mut waits: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); records.len()];
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); records.len()];
    for (position, record) in records.iter().enumerate() {
        for text in &record.as_ref().depends {
            if let Some(&on) = index.get(&*PackageName::normalized_name_from_matchspec_str(text))
                && on != position
                && waits[position].insert(on)
            {
                followers[on].push(position);
            }
        }
    }
    let mut ready: BTreeSet<usize> = (0..records.len()).filter(|&position| waits[position].is_empty()).collect();
    let mut left: BTreeSet<usize> = (0..records.len()).collect();
    let mut order = Vec::with_capacity(records.len());
    while !left.is_empty() {
        let next = ready.pop_first().unwrap_or_else(|| {
            // Only circles and what hangs on them are left: walk to a circle and open it.
            let mut path = Vec::new();
            let mut on_path = BTreeSet::new();
            let mut at = left.first().copied().unwrap_or_default();
            while on_path.insert(at) {
                path.push(at);
                match waits[at].first() {
                    Some(&on) => at = on,
                    None => break,
                }
            }
            let start = path.iter().position(|&seen| seen == at).unwrap_or(0);
            let circle = &path[start..];
            let python = circle.iter().find(|&&member| records[member].as_ref().name.as_normalized() == "python");
            python.or(circle.iter().min()).copied().unwrap_or(at)
        });
        left.remove(&next);
        ready.remove(&next);
        order.push(next);
        for &follower in &followers[next] {
            waits[follower].remove(&next);
            if waits[follower].is_empty() && left.contains(&follower) {
                ready.insert(follower);
            }
        }
    }
    let mut slots: Vec<Option<T>> = records.into_iter().map(Some).collect();
    order.into_iter().filter_map(|position| slots[position].take()).collect()
}
