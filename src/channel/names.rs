//! Addresses of hosts: each name is looked up once at a time, on a thread of its own.
//!
//! A hundred requests to one host open a hundred connections before the first is answered, and each would ask the system for the same name; where a name
//! server drops what it cannot answer, such a lookup waits for seconds, on threads that files are read on too.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// How long an answer is kept.
const KEPT: Duration = Duration::from_secs(60);

/// An error that several waiters get.
type Answer = std::result::Result<Vec<SocketAddr>, (io::ErrorKind, Arc<str>)>;

struct Lookup {
    begun: Instant,
    answer: Shared<BoxFuture<'static, Answer>>,
}

/// The system's resolver (`getaddrinfo`).
#[derive(Default)]
pub(super) struct Names {
    lookups: Mutex<HashMap<String, Lookup>>,
}

impl Names {
    fn answer(
        &self,
        host: &str,
        look_up: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> Shared<BoxFuture<'static, Answer>> {
        let mut lookups = self.lookups.lock().unwrap_or_else(PoisonError::into_inner);
        let good = |lookup: &&Lookup| match lookup.answer.peek() {
            None => true,
            Some(answer) => answer.is_ok() && lookup.begun.elapsed() < KEPT,
        };
        if let Some(lookup) = lookups.get(host).filter(good) {
            return lookup.answer.clone();
        }
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let name = host.to_owned();
        let failed = |error: io::Error| (error.kind(), Arc::from(error.to_string()));
        let started = std::thread::Builder::new().name("names".to_owned()).spawn(move || {
            let _ = sender.send(look_up(&name).map_err(failed));
        });
        let answer = async move {
            started.map_err(failed)?;
            receiver.await.unwrap_or_else(|_| Err((io::ErrorKind::Other, Arc::from("the lookup ended without an answer"))))
        };
        let answer = answer.boxed().shared();
        lookups.insert(host.to_owned(), Lookup { begun: Instant::now(), answer: answer.clone() });
        answer
    }
}

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        let answer = self.answer(name.as_str(), |name| Ok((name, 0).to_socket_addrs()?.collect()));
        Box::pin(async move {
            match answer.await {
                Ok(found) => Ok(Box::new(found.into_iter()) as Addrs),
                Err((kind, message)) => Err(io::Error::new(kind, message.to_string()).into()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_name_is_looked_up_once_and_failures_are_forgotten() {
        let names = Names::default();
        let count = Arc::new(AtomicUsize::new(0));
        let ask = |host: &str| {
            let count = count.clone();
            names.answer(host, move |name| {
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(50));
                match name {
                    "there.example" => Ok(vec![([127, 0, 0, 1], 0).into()]),
                    _ => Err(io::Error::other("no such host")),
                }
            })
        };
        let all = futures::future::join_all((0..100).map(|_| ask("there.example"))).await;
        assert!(all.iter().all(|answer| answer.as_ref().unwrap().len() == 1));
        ask("there.example").await.unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 1);
        for _ in 0..2 {
            assert_eq!(&*ask("gone.example").await.unwrap_err().1, "no such host");
        }
        assert_eq!(count.load(Ordering::Relaxed), 3);
        let resolved: Vec<SocketAddr> = names.resolve("localhost".parse().unwrap()).await.unwrap().collect();
        assert!(resolved.iter().all(|address| address.ip().is_loopback()) && !resolved.is_empty());
    }
}
