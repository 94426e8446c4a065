// A process group as strict as NCCL's, whose bytes gloo carries.
//
// - All tensors of a collective are on one device, contiguous, of dtypes that NCCL knows; on the bound device, if any.
// - A communicator is made at the first collective on a device, while the calling thread waits for all ranks; the
//   connection of two ranks at the first all-to-all in which one has something for the other, while both wait.
// - Two ranks on one device are refused.
// - All ranks call the same collectives in the same order. If they do not, real ranks would hang or mix their data.
// - work.wait() holds up the caller's stream and not the host.
// - A rank that has gone is not noticed: what waits for it goes on waiting.
#pragma once

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <set>

#include "operators.h"

namespace paper_gpu {

using Tensors = std::vector<Tensor>;
using c10d::OpType;
using c10d::Work;

template <class T>
using Pointer = c10::intrusive_ptr<T>;

class PaperWork final : public Work {
  Mark end;
  int device;
  bool blocks;  // the host, too: a barrier
  Tensors kept;

 public:
  PaperWork(int rank, OpType type, Mark end, int device, bool blocks, Tensors kept)
      : Work(rank, type), end(end), device(device), blocks(blocks), kept(std::move(kept)) {}

  bool isCompleted() override { return end.is_done(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return kept; }

  bool wait(std::chrono::milliseconds) override {
    if (blocks) {
      WithoutGil waiting;
      end.wait();
    } else {
      queue(device).put([mark = end] { mark.wait(); }, false);
    }
    kept.clear();
    return true;
  }

  Pointer<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    {
      WithoutGil waiting;
      end.wait();
    }
    future->markCompleted(kept);
    return future;
  }
};

struct Options final : c10d::Backend::Options {
  bool is_high_priority_stream = false;
  pybind11::object split_from, config;
  int64_t split_color = 0;

  Options() : c10d::Backend::Options("nccl", std::chrono::minutes(10)) {}
};

inline Tensor bytes(const Tensor& tensor) { return tensor.view(-1).view(at::kByte); }

inline Tensors bytes(const Tensors& tensors) {
  Tensors made;
  for (auto& each : tensors) made.push_back(bytes(each));
  return made;
}

inline Tensors for_tasks(const Tensors& tensors) {
  Tensors made;
  for (auto& each : tensors) made.push_back(for_tasks(each));
  return made;
}

inline Tensors joined(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Add up `tensor`, in place.
inline void all_reduce(c10d::Backend& gloo, Tensor tensor, c10d::ReduceOp op) {
  bool is_average = op == c10d::ReduceOp::AVG, is_bool = tensor.scalar_type() == at::kBool;
  c10d::AllreduceOptions options;
  options.reduceOp = is_average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  Tensors one{is_bool ? tensor.to(at::kByte) : tensor};
  gloo.allreduce(one, options)->wait();
  if (is_bool) tensor.copy_(one[0]);
  if (is_average) tensor.div_(gloo.getSize());
}

class ProcessGroup final : public c10d::Backend {
  using Body = std::function<void(c10d::Backend&)>;

  // A connection for each thread: while one waits for a key, its connection serves nobody else.
  Pointer<c10d::Store> caller_store, stream_store;
  Pointer<c10d::Backend> gloo;
  Pointer<Options> options;
  std::mutex lock;
  std::map<int, Queue*> communicators;   // by device
  std::map<std::string, Queue*> pairs;   // of ranks that send to each other
  std::set<int> connected;               // ranks that this one has had an all-to-all with
  uint64_t collectives = 0;

 public:
  ProcessGroup(Pointer<c10d::Store> store, int rank, int size, Pointer<Options> options, Pointer<c10d::Backend> gloo)
      : Backend(rank, size),
        caller_store(store->clone()),
        stream_store(store->clone()),
        gloo(std::move(gloo)),
        options(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }
  Pointer<c10d::Backend::Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  void setSequenceNumberForGroup() override {}

  // As NCCL finalises its communicators: what is under way comes to its end, unless a rank has gone.
  void shutdown() override {
    WithoutGil waiting;
    std::vector<Queue*> all;
    {
      std::unique_lock<std::mutex> hold(lock, std::try_to_lock);
      if (!hold) return;  // a thread waits for ranks to make a communicator, and one of them may have gone
      for (auto& [device, stream] : communicators) all.push_back(stream);
      for (auto& [ranks, stream] : pairs) all.push_back(stream);
    }
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(setting("PAPER_GPU_SHUTDOWN_S", 20));
    for (auto* stream : all)
      while (stream && !stream->has_done(stream->last()) && std::chrono::steady_clock::now() < end) usleep(1000);
  }
  uint64_t getSequenceNumberForGroup() override { return collectives; }
  void eagerConnectSingleDevice(at::Device device) override {
    WithoutGil waiting;
    communicator(device.index());
  }

  Pointer<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& given) override {
    Tensor tensor = for_tasks(tensors[0]);
    auto what = say("broadcast", tensor) + " from " + std::to_string(given.rootRank);
    return run(OpType::BROADCAST, what, check(tensors), tensors, [tensor, given](c10d::Backend& gloo) {
      Tensors one{bytes(tensor)};
      gloo.broadcast(one, given)->wait();
    });
  }

  Pointer<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    int device = check_sums(tensors);
    Tensor tensor = for_tasks(tensors[0]);
    return run(OpType::ALLREDUCE, say("all_reduce", tensor), device, tensors,
               [tensor, op = given.reduceOp](c10d::Backend& gloo) { all_reduce(gloo, tensor, op); });
  }

  Pointer<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    int device = check_sums(tensors);
    return run(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", device, tensors,
               [all = for_tasks(tensors), op = given.reduceOp](c10d::Backend& gloo) {
                 for (auto& tensor : all) all_reduce(gloo, tensor, op);
               });
  }

  Pointer<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    int device = check_sums(tensors);
    Tensor tensor = for_tasks(tensors[0]);
    return run(OpType::REDUCE, say("reduce", tensor), device, tensors, [tensor, given, this](c10d::Backend& gloo) {
      Tensor sum = tensor.clone();
      all_reduce(gloo, sum, given.reduceOp);
      if (rank_ == given.rootRank) tensor.copy_(sum);
    });
  }

  Pointer<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto all = joined(outputs[0], inputs);
    int device = check(all);
    Tensors to = for_tasks(outputs[0]);
    Tensor from = for_tasks(inputs[0]);
    for (auto& each : to) TORCH_CHECK(each.scalar_type() == from.scalar_type(), "all_gather of several dtypes");
    return run(OpType::ALLGATHER, say("all_gather", from), device, all, [to, from](c10d::Backend& gloo) {
      std::vector<Tensors> gathered{bytes(to)};
      Tensors mine{bytes(from)};
      gloo.allgather(gathered, mine)->wait();
    });
  }

  Pointer<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    int device = check({output, input});
    TORCH_CHECK(input.scalar_type() == output.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(input.numel() * size_ == output.numel(), "output tensor size must be equal to world_size times input");
    Tensor to = for_tasks(output), from = for_tasks(input);
    auto body = [to, from, size = size_](c10d::Backend& gloo) {
      if (!from.numel()) return;
      auto parts = bytes(to).chunk(size);
      std::vector<Tensors> gathered{Tensors(parts.begin(), parts.end())};
      Tensors mine{bytes(from.clone())};  // it may be a part of the output
      gloo.allgather(gathered, mine)->wait();
    };
    return run(OpType::_ALLGATHER_BASE, say("all_gather_into_tensor", from), device, {output, input}, body);
  }

  Pointer<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& given) override {
    Pointer<Work> last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], given);
    return last;
  }

  Pointer<Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& given) override {
    int device = check_sums({output, input});
    TORCH_CHECK(output.numel() * size_ == input.numel(), "input tensor must be as large as output times world size");
    Tensor to = for_tasks(output), from = for_tasks(input);
    auto body = [to, from, op = given.reduceOp, this](c10d::Backend& gloo) {
      Tensor sum = from.clone();
      all_reduce(gloo, sum, op);
      to.view(-1).copy_(sum.view(-1).chunk(size_)[rank_]);
    };
    return run(OpType::_REDUCE_SCATTER_BASE, say("reduce_scatter_tensor", to), device, {output, input}, body);
  }

  Pointer<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::ReduceScatterOptions& given) override {
    Pointer<Work> last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], given);
    return last;
  }

  Pointer<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ReduceScatterOptions& given) override {
    auto all = joined(inputs[0], outputs);
    int device = check_sums(all);
    Tensor to = for_tasks(outputs[0]);
    auto body = [to, from = for_tasks(inputs[0]), op = given.reduceOp, this](c10d::Backend& gloo) {
      for (int rank = 0; rank < size_; ++rank) {
        Tensor sum = from[rank].clone();
        all_reduce(gloo, sum, op);
        if (rank == rank_) to.copy_(sum);
      }
    };
    return run(OpType::REDUCE_SCATTER, say("reduce_scatter", to), device, all, body);
  }

  Pointer<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& given) override {
    bool is_root = rank_ == given.rootRank;
    auto all = is_root ? joined(outputs[0], inputs) : inputs;
    int device = check(all);
    Tensors to = is_root ? for_tasks(outputs[0]) : Tensors();
    Tensor from = for_tasks(inputs[0]);
    auto body = [to, from, given](c10d::Backend& gloo) {
      std::vector<Tensors> gathered;
      if (!to.empty()) gathered.push_back(bytes(to));
      Tensors mine{bytes(from)};
      gloo.gather(gathered, mine, given)->wait();
    };
    return run(OpType::GATHER, say("gather", from) + " to " + std::to_string(given.rootRank), device, all, body);
  }

  Pointer<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& given) override {
    bool is_root = rank_ == given.rootRank;
    auto all = is_root ? joined(inputs[0], outputs) : outputs;
    int device = check(all);
    Tensors from = is_root ? for_tasks(inputs[0]) : Tensors();
    Tensor to = for_tasks(outputs[0]);
    auto body = [to, from, given](c10d::Backend& gloo) {
      std::vector<Tensors> parts;
      if (!from.empty()) parts.push_back(bytes(from));
      Tensors mine{bytes(to)};
      gloo.scatter(mine, parts, given)->wait();
    };
    return run(OpType::SCATTER, say("scatter", to) + " from " + std::to_string(given.rootRank), device, all, body);
  }

  Pointer<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes,
                              std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions&) override {
    int device = check({output, input});
    connect(to_sizes, from_sizes);
    Tensor to = for_tasks(output), from = for_tasks(input);
    auto body = [to, from, to_sizes, from_sizes](c10d::Backend& gloo) mutable {
      gloo.alltoall_base(to, from, to_sizes, from_sizes)->wait();
    };
    return run(OpType::ALLTOALL_BASE, "all_to_all_single", device, {output, input}, body);
  }

  Pointer<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    auto all = joined(outputs, inputs);
    int device = check(all);
    auto body = [to = for_tasks(outputs), from = for_tasks(inputs)](c10d::Backend& gloo) {
      std::vector<int64_t> to_sizes, from_sizes;
      for (auto& each : to) to_sizes.push_back(each.nbytes());
      for (auto& each : from) from_sizes.push_back(each.nbytes());
      Tensor sent = at::cat(bytes(from)), received = at::cat(bytes(to));
      gloo.alltoall_base(received, sent, to_sizes, from_sizes)->wait();
      auto parts = received.split_with_sizes(to_sizes);
      for (size_t i = 0; i < to.size(); ++i) bytes(to[i]).copy_(parts[i]);
    };
    return run(OpType::ALLTOALL, "all_to_all", device, all, body);
  }

  Pointer<Work> send(Tensors& tensors, int to, int) override {
    auto body = [tensor = for_tasks(tensors[0]), to](c10d::Backend& gloo) {
      Tensors one{bytes(tensor)};
      gloo.send(one, to, 0)->wait();
    };
    return run(OpType::SEND, "send", check(tensors), tensors, body, to);
  }

  Pointer<Work> recv(Tensors& tensors, int from, int) override {
    auto body = [tensor = for_tasks(tensors[0]), from](c10d::Backend& gloo) {
      Tensors one{bytes(tensor)};
      gloo.recv(one, from, 0)->wait();
    };
    return run(OpType::RECV, "recv", check(tensors), tensors, body, from);
  }

  Pointer<Work> barrier(const c10d::BarrierOptions& given) override {
    int device = getBoundDeviceId()            ? getBoundDeviceId()->index()
                 : !given.device_ids.empty()   ? given.device_ids[0]
                 : !communicators.empty()      ? communicators.begin()->first
                                               : rank_ % DEVICES;
    return run(OpType::BARRIER, "barrier", device, {}, [](c10d::Backend& gloo) { gloo.barrier()->wait(); });
  }

 private:
  // Returns the device of all these tensors.
  static int check(const Tensors& tensors) {
    static const std::set<at::ScalarType> known{at::kChar, at::kByte, at::kFloat, at::kDouble, at::kInt, at::kLong,
                                                at::kHalf, at::kBool, at::kBFloat16, at::kFloat8_e5m2,
                                                at::kFloat8_e4m3fn};
    TORCH_CHECK(!tensors.empty(), "Tensor list must be nonempty");
    int device = -1;
    for (auto& each : tensors) {
      TORCH_CHECK(each.is_cuda() && !each.is_sparse(), "Tensors must be CUDA and dense");
      TORCH_CHECK(each.is_contiguous(each.suggest_memory_format()), "Tensors must be contiguous");
      TORCH_CHECK(known.count(each.scalar_type()), "Input tensor data type is not supported for NCCL process group: ",
                  each.scalar_type());
      TORCH_CHECK(device < 0 || device == each.get_device(), "Expected list of tensors on the same device");
      device = each.get_device();
    }
    return device;
  }

  static int check_sums(const Tensors& tensors) {
    for (auto& each : tensors) TORCH_CHECK(!c10::isFloat8Type(each.scalar_type()), "FP8 sums need newer GPUs");
    return check(tensors);
  }

  static std::string say(const char* what, const Tensor& tensor) {
    return std::string(what) + " of " + std::to_string(tensor.numel()) + " " + c10::toString(tensor.scalar_type());
  }

  Queue& communicator(int device) {
    std::lock_guard<std::mutex> hold(lock);
    if (getBoundDeviceId() && getBoundDeviceId()->index() != device) {
      C10_THROW_ERROR(DistBackendError, "Attempt to perform collective on tensor not on device passed to "
                                        "init_process_group");
    }
    auto& one = communicators[device];
    if (one) return *one;
    std::string key = "paper_gpu/communicator/" + std::to_string(communicators.size()) + "/";
    auto* host = std::getenv("NCCL_HOSTID");  // ranks of other hosts have other GPUs
    auto mine = (host ? std::string(host) + ":" : std::string()) + std::to_string(device);
    caller_store->set(key + std::to_string(rank_), mine);
    for (int rank = 0; rank < size_; ++rank) {
      auto found = caller_store->get_to_str(key + std::to_string(rank));
      TORCH_CHECK_WITH(DistBackendError, rank == rank_ || found != mine,
                       "NCCL error: invalid usage. Duplicate GPU detected : rank ", rank_, " and rank ", rank,
                       " both on CUDA device ", found);
    }
    return *(one = new_communicator(device));
  }

  void connect(const std::vector<int64_t>& to_sizes, const std::vector<int64_t>& from_sizes) {
    WithoutGil waiting;
    for (int rank = 0; rank < size_; ++rank) {
      bool meets = to_sizes.empty() || from_sizes.empty() || to_sizes[rank] || from_sizes[rank];
      if (rank == rank_ || !meets || !connected.insert(rank).second) continue;
      std::string key = "paper_gpu/connection/" + std::to_string(std::min(rank_, rank)) + ":" +
                        std::to_string(std::max(rank_, rank)) + "/";
      caller_store->set(key + std::to_string(rank_), "here");
      caller_store->get_to_str(key + std::to_string(rank));
    }
  }

  // Between the ranks a collective runs on a stream of its own, after what the caller's stream has been given.
  Pointer<Work> run(OpType type, std::string what, int device, Tensors kept, Body body, int peer = -1) {
    WithoutGil waiting;
    auto* stream = &communicator(device);
    uint64_t number = 0;
    if (peer < 0) {
      std::lock_guard<std::mutex> hold(lock);
      number = ++collectives;
    } else {
      std::lock_guard<std::mutex> hold(lock);
      auto& pair = pairs[std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer))];
      stream = pair ? pair : pair = new_communicator(device);
    }
    auto ticket = stream->put([this, before = mark(device), what, body, number] {
      before.wait();
      try {
        if (number) compare(number, what);
        body(*gloo);
      } catch (std::exception& error) {
        fprintf(stderr, "[paper GPU] %s waits without end: %s\n", what.c_str(), error.what());
        for (;;) pause();
      }
    });
    return c10::make_intrusive<PaperWork>(rank_, type, Mark{stream, ticket}, device, type == OpType::BARRIER,
                                          std::move(kept));
  }

  void compare(uint64_t number, const std::string& what) {
    std::string key = "paper_gpu/collective/" + std::to_string(number) + "/";
    stream_store->set(key + std::to_string(rank_), what);
    for (int rank = 0; rank < size_; ++rank) {
      auto found = stream_store->get_to_str(key + std::to_string(rank));
      if (found == what) continue;
      fault("collective " + std::to_string(number) + " of a group: " + what + " on rank " + std::to_string(rank_) +
            ", " + found + " on rank " + std::to_string(rank));
      _exit(77);
    }
  }
};

}  // namespace paper_gpu
