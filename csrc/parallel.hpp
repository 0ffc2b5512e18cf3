// Work in equal parts on threads that live for one call.

#pragma once

#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

// Runs body(part) for part 0 to parts - 1, each on a thread of its own, part 0 on this one. Rethrows the exception of
// the first part that threw. Where the system grants no more threads, the rest runs here.
template <typename Body>
void in_parallel(int parts, const Body& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(parts));
  auto guarded = [&](int part) {
    try {
      body(part);
    } catch (...) {
      errors[static_cast<std::size_t>(part)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  int begun = 1;
  for (; begun < parts; ++begun) {
    try {
      threads.emplace_back(guarded, begun);
    } catch (const std::system_error&) {
      break;
    }
  }
  guarded(0);
  for (int part = begun; part < parts; ++part) guarded(part);
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}
