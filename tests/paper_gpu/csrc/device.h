// Devices, streams and events.
//
// A stream is a thread that carries out tasks in their order, each a little after it could: code that does not wait
// for a stream where CUDA would need it meets memory that is not filled yet, or that is already given away. A device's
// memory has two addresses: the one that tensors have, which the host may not touch, and one that only tasks use.
#pragma once

#include <Python.h>
#include <c10/core/Device.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace paper_gpu {

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr size_t ADDRESSES = size_t(1) << 38;  // of one device: more than it ever gives out, as none is given out twice
constexpr int STREAMS = 32;                    // torch, too, has pools of so many, and then gives the first one again

inline size_t setting(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

inline const int DEVICES = int(setting("PAPER_GPUS", 2));
inline const size_t CAPACITY = setting("PAPER_GPU_MIB", 4096) << 20;
inline const size_t LAG_US = setting("PAPER_GPU_LAG_US", 100);

inline std::mutex faults_lock;
inline std::vector<std::string> faults;  // what would hang, or give wrong values, on real GPUs

inline void fault(const std::string& what) {
  std::lock_guard<std::mutex> hold(faults_lock);
  faults.push_back(what);
  fprintf(stderr, "[paper GPU] %s\n", what.c_str());
}

// Around code that may wait for a stream, which may wait for another thread of Python's.
class WithoutGil {
  std::optional<pybind11::gil_scoped_release> released;

 public:
  WithoutGil() {
    if (PyGILState_Check()) released.emplace();
  }
};

class Queue {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t submitted = 0, done = 0;

 public:
  Queue() {
    std::thread([this] { run(); }).detach();
  }

  uint64_t put(std::function<void()> task, bool lags = true) {
    std::lock_guard<std::mutex> hold(lock);
    if (lags && LAG_US) {
      task = [task = std::move(task)] {
        thread_local std::mt19937 random{std::random_device{}()};
        usleep(random() % (2 * LAG_US));
        task();
      };
    }
    tasks.push_back(std::move(task));
    changed.notify_all();
    return ++submitted;
  }

  bool has_done(uint64_t ticket) {
    std::lock_guard<std::mutex> hold(lock);
    return done >= ticket;
  }

  void wait(uint64_t ticket) {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [&] { return done >= ticket; });
  }

  uint64_t last() {
    std::lock_guard<std::mutex> hold(lock);
    return submitted;
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      try {
        c10::InferenceMode no_graph;
        task();
      } catch (std::exception& error) {
        fault(std::string("an error in a stream: ") + error.what());
      }
      task = nullptr;
      {
        std::lock_guard<std::mutex> hold(lock);
        ++done;
      }
      changed.notify_all();
    }
  }
};

// What streams wait for that a test holds, until it releases all of them for good.
class Held {
  std::mutex lock;
  std::condition_variable changed;
  bool is_released = false;

 public:
  static Held& instance() {
    static auto* held = new Held;  // streams may wait when the process ends
    return *held;
  }

  void wait() {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [&] { return is_released; });
  }

  void release() {
    std::lock_guard<std::mutex> hold(lock);
    is_released = true;
    changed.notify_all();
  }
};

// An event: a place in a stream.
struct Mark {
  Queue* queue = nullptr;
  uint64_t ticket = 0;

  bool is_done() const { return !queue || queue->has_done(ticket); }
  void wait() const {
    if (queue) queue->wait(ticket);
  }
};

// Streams that still use some memory: of each the last place.
class Uses {
  std::map<Queue*, uint64_t> tickets;

 public:
  void add(const Mark& mark) { tickets[mark.queue] = std::max(tickets[mark.queue], mark.ticket); }
  bool are_done() const {
    for (auto& [queue, ticket] : tickets)
      if (!queue->has_done(ticket)) return false;
    return true;
  }
};

struct Block {
  size_t size;
  int64_t stream;
  std::set<int64_t> used_on;  // other streams: record_stream
};

struct Device {
  std::mutex lock;
  bool has_context = false;
  char *shown = nullptr, *real = nullptr;  // the same memory
  std::vector<Queue*> streams;
  std::vector<Queue*> communicators;  // streams of process groups, for whose collectives a wait for the device waits
  // What the allocator knows (memory.h).
  size_t next = 0, allocated = 0, peak = 0, reserved = 0;
  std::map<char*, Block> blocks;
  std::map<std::pair<int64_t, size_t>, std::vector<char*>> free;  // by stream and size
  struct Segment {
    size_t size, cut, in_use;  // in bytes; bytes of which blocks were made; blocks
  };
  std::map<char*, Segment> segments;
  std::map<std::pair<int64_t, size_t>, char*> open;  // the last one of a stream and size
  struct Leaving {
    char* at;
    Block block;
    Uses uses;
  };
  std::vector<Leaving> leaving;  // freed, while other streams use it

  bool holds(const void* pointer) const {
    return has_context && (const char*)pointer >= shown && (const char*)pointer < shown + ADDRESSES;
  }
};

inline Device* devices() {
  static Device* all = new Device[DEVICES + 1];  // never destroyed: threads use it to the end
  return all;
}

inline bool is_forked = false;
inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_streams;

inline void* reserve(int protection) {
  void* at = mmap(nullptr, ADDRESSES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "no address space for a paper GPU");
  return at;
}

inline Device& device(int index) {
  TORCH_CHECK(!is_forked, "CUDA error: initialization error: this process was forked after CUDA was initialised");
  TORCH_CHECK(index >= 0 && index < DEVICES, "CUDA error: invalid device ordinal ", index);
  static std::mutex making;
  std::lock_guard<std::mutex> hold(making);
  auto& one = devices()[index];
  if (!one.has_context) {
    static int once = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
    (void)once;
    one.shown = (char*)reserve(PROT_NONE);
    one.real = (char*)reserve(PROT_READ | PROT_WRITE);
    one.streams.push_back(new Queue);
    one.has_context = true;
  }
  return one;
}

inline int64_t stream_of(int index) {
  auto found = current_streams.find(index);
  return found == current_streams.end() ? 0 : found->second;
}

inline Queue& queue(int index, int64_t stream) {
  auto& one = device(index);
  std::lock_guard<std::mutex> hold(one.lock);
  return *one.streams.at(stream);
}

inline Queue& queue(int index) { return queue(index, stream_of(index)); }

inline Queue* new_communicator(int index) {
  auto& one = device(index);
  std::lock_guard<std::mutex> hold(one.lock);
  one.communicators.push_back(new Queue);
  return one.communicators.back();
}

inline int64_t new_stream(int index) {
  auto& one = device(index);
  std::lock_guard<std::mutex> hold(one.lock);
  if (one.streams.size() <= STREAMS) {
    one.streams.push_back(new Queue);
    return one.streams.size() - 1;
  }
  static std::atomic<int> turn{0};
  return 1 + turn++ % STREAMS;
}

// The end of what the caller's current stream has been given.
inline Mark mark(int index) {
  auto& stream = queue(index);
  return {&stream, stream.last()};
}

inline void synchronise(int index) {
  WithoutGil waiting;
  std::vector<Queue*> streams;
  {
    auto& one = device(index);
    std::lock_guard<std::mutex> hold(one.lock);
    streams = one.streams;
    streams.insert(streams.end(), one.communicators.begin(), one.communicators.end());
  }
  for (auto* stream : streams) stream->wait(stream->last());
}

inline int device_of(const void* pointer) {
  for (int index = 0; index < DEVICES; ++index)
    if (devices()[index].holds(pointer)) return index;
  return -1;
}

// Where tasks find what tensors point to.
inline char* real(const void* pointer) {
  int index = device_of(pointer);
  if (index < 0) return (char*)pointer;
  auto& one = devices()[index];
  return one.real + ((const char*)pointer - one.shown);
}

}  // namespace paper_gpu
