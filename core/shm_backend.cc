#include "fullshard/core/shm_backend.h"

#include <algorithm>
#include <cstring>

#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/completed_work.h"
#include "fullshard/core/shm_memory.h"
#include "fullshard/core/shm_reduce.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"

namespace fullshard {
namespace {

using c10d::OpType;
using c10d::ReduceOp;

// [Note: Staging] Each rank owns kNumSlots slots of kSlotBytes that all ranks
// map. A collective is cut into chunks; chunk k goes through slot k % kNumSlots
// of every rank. A rank writes its part, posts kWritten, reads the others'
// parts, posts kRead. A slot is written again once every rank has read it, so
// ranks run up to kNumSlots - 1 chunks apart and never meet in lock-step.
constexpr int64_t kNumSlots = 4;
constexpr int64_t kSlotBytes = 256 << 10;
// Up to here every rank reduces everything itself: one meeting instead of two.
constexpr int64_t kSmallReductionBytes = 16 << 10;
constexpr int64_t kAlignment = 64;

int64_t round_down(int64_t value, int64_t multiple) {
  return value / multiple * multiple;
}

int64_t round_up(int64_t value, int64_t multiple) {
  return round_down(value + multiple - 1, multiple);
}

int64_t num_chunks(int64_t num_bytes, int64_t chunk_bytes) {
  return std::max<int64_t>(1, (num_bytes + chunk_bytes - 1) / chunk_bytes);
}

const char* name_of(OpType operation) {
  switch (operation) {
    case OpType::BROADCAST:
      return "broadcast";
    case OpType::ALLREDUCE:
      return "all_reduce";
    case OpType::_ALLGATHER_BASE:
      return "all_gather";
    case OpType::_REDUCE_SCATTER_BASE:
      return "reduce_scatter";
    case OpType::BARRIER:
      return "barrier";
    default:
      return "share_memory";
  }
}

void check_tensor(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK(tensor.device().is_cpu(), "shm ", operation,
              ": expected a CPU tensor, got one on ", tensor.device());
  TORCH_CHECK(
      tensor.layout() == at::kStrided && tensor.is_contiguous(), "shm ",
      operation, ": expected a contiguous tensor, got strides ",
      tensor.layout() == at::kStrided ? tensor.strides() : at::IntArrayRef());
}

void check_reduction(const ReduceOp& reduction, at::ScalarType dtype,
                     const char* operation) {
  TORCH_CHECK(reduction == ReduceOp::SUM || reduction == ReduceOp::AVG ||
                  reduction == ReduceOp::MAX || reduction == ReduceOp::MIN,
              "shm ", operation,
              ": expected SUM, AVG, MAX or MIN, got c10d::ReduceOp ",
              static_cast<int>(reduction.op_));
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble ||
                  dtype == at::kBFloat16 || dtype == at::kHalf ||
                  dtype == at::kLong,
              "shm ", operation,
              ": expected float, double, bfloat16, half or int64, got ", dtype);
}

void check_single(size_t num_tensors, const char* operation) {
  TORCH_CHECK(num_tensors == 1, "shm ", operation,
              ": expected one tensor per rank, got ", num_tensors);
}

template <typename T>
void divide(void* data, int64_t numel, int divisor) {
  T* values = static_cast<T*>(data);
  for (int64_t i = 0; i < numel; ++i) values[i] /= static_cast<T>(divisor);
}

void reduce_slices(void* out, const std::vector<const void*>& sources,
                   at::ScalarType dtype, int64_t numel, int reduction) {
  const int num_ranks = static_cast<int>(sources.size());
  if (reduction == ReduceOp::MAX) return max_slices(out, sources, dtype, numel);
  if (reduction == ReduceOp::MIN) return min_slices(out, sources, dtype, numel);
  const bool average = reduction == ReduceOp::AVG;
  // A float factor would cost double and int64 their precision.
  const bool exact = dtype == at::kDouble || dtype == at::kLong;
  const float scale = average && !exact ? 1.0f / num_ranks : 1.0f;
  sum_slices(out, dtype, sources, dtype, numel, scale, /*accumulate=*/false);
  if (average && dtype == at::kDouble) divide<double>(out, numel, num_ranks);
  if (average && dtype == at::kLong) divide<int64_t>(out, numel, num_ranks);
}

void copy(char* to, const char* from, int64_t num_bytes) {
  if (to != from && num_bytes > 0) std::memcpy(to, from, num_bytes);
}

bool overlap(const char* a, int64_t a_bytes, const char* b, int64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

char* bytes_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<char*>(tensor.data_ptr());
}

int64_t size_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

// Applies a collective's own time-out, if it has one, while the object lives.
class TimeoutGuard {
 public:
  TimeoutGuard(internal::ShmPeers& peers, std::chrono::milliseconds timeout)
      : peers_(peers), before_(peers.timeout()) {
    if (timeout > std::chrono::milliseconds(0)) peers_.set_timeout(timeout);
  }
  ~TimeoutGuard() { peers_.set_timeout(before_); }
  TimeoutGuard(const TimeoutGuard&) = delete;
  TimeoutGuard& operator=(const TimeoutGuard&) = delete;

 private:
  internal::ShmPeers& peers_;
  const std::chrono::milliseconds before_;
};

// Runs `write` one chunk ahead of `read`.
template <typename Write, typename Read>
void pipeline(int64_t num_chunks, const Write& write, const Read& read) {
  write(0);
  for (int64_t k = 0; k < num_chunks; ++k) {
    if (k + 1 < num_chunks) write(k + 1);
    read(k);
  }
}

}  // namespace

struct alignas(64) ShmBackend::Slot {
  Call call;
};

bool ShmBackend::Call::operator==(const Call& other) const {
  return sequence == other.sequence && num_bytes == other.num_bytes &&
         operation == other.operation && dtype == other.dtype &&
         reduction == other.reduction && root == other.root;
}

absl::StatusOr<c10::intrusive_ptr<ShmBackend>> ShmBackend::create(
    const ShmGroupOptions& options) {
  FS_ASSIGN_OR_RETURN(std::shared_ptr<internal::ShmPeers> peers,
                      internal::ShmPeers::connect(options));
  try {
    // The constructor is private: make_intrusive cannot reach it.
    return c10::intrusive_ptr<ShmBackend>::unsafe_steal_from_new(
        new ShmBackend(std::move(peers), options));
  } catch (const c10::Error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "group '", options.group_name, "': ", error.what_without_backtrace()));
  }
}

ShmBackend::ShmBackend(std::shared_ptr<internal::ShmPeers> peers,
                       const ShmGroupOptions& options)
    : Backend(options.rank, options.size), peers_(std::move(peers)) {
  auto map = [this](size_t num_bytes) {
    num_bytes = internal::round_up_to_pages(num_bytes);
    return std::make_unique<internal::SharedMapping>(
        peers_->share_memory_file(num_bytes), num_bytes);
  };
  const size_t header_bytes = internal::round_up_to_pages(
      static_cast<size_t>(size_ * kNumSlots) * sizeof(Slot));
  staging_ =
      map(header_bytes + static_cast<size_t>(size_ * kNumSlots * kSlotBytes));
  signals_ = std::make_unique<ShmSignals>(
      peers_, map(ShmSignals::num_bytes(kNumSignals, size_)), kNumSignals);
  setGroupUid(options.group_name);
}

ShmBackend::~ShmBackend() = default;

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  peers_->set_timeout(timeout);
}

void ShmBackend::abort() { peers_->leave(); }

ShmBackend::Slot& ShmBackend::slot(int rank, uint32_t chunk) const {
  auto* slots = reinterpret_cast<Slot*>(staging_->data());
  return slots[rank * kNumSlots + chunk % kNumSlots];
}

char* ShmBackend::staging(int rank, uint32_t chunk) const {
  const int64_t header_bytes = static_cast<int64_t>(staging_->num_bytes()) -
                               size_ * kNumSlots * kSlotBytes;
  return staging_->data() + header_bytes +
         (rank * kNumSlots + chunk % kNumSlots) * kSlotBytes;
}

ShmBackend::Call ShmBackend::begin_call(OpType operation,
                                        const at::Tensor& tensor,
                                        int64_t num_bytes, int reduction,
                                        int root) {
  Call call{};
  call.sequence = ++sequence_;
  call.num_bytes = num_bytes;
  call.operation = static_cast<int16_t>(operation);
  call.dtype =
      static_cast<int16_t>(tensor.defined() ? tensor.scalar_type() : at::kByte);
  call.reduction = static_cast<int16_t>(reduction);
  call.root = static_cast<int16_t>(root);
  return call;
}

std::string ShmBackend::describe(const Call& call) const {
  static constexpr const char* kReductions[] = {"sum", "average", "product",
                                                "min", "max"};
  const OpType operation = static_cast<OpType>(call.operation);
  std::string text = absl::StrCat(name_of(operation), " #", call.sequence);
  if (operation == OpType::BARRIER) return text;
  absl::StrAppend(&text, " of ", call.num_bytes, " bytes per rank, ",
                  c10::toString(static_cast<at::ScalarType>(call.dtype)));
  if (operation == OpType::BROADCAST) {
    absl::StrAppend(&text, ", from ", peers_->name(call.root));
  }
  if (operation == OpType::ALLREDUCE ||
      operation == OpType::_REDUCE_SCATTER_BASE) {
    absl::StrAppend(&text, ", ", kReductions[call.reduction]);
  }
  return text;
}

// Returns this rank's slot for the chunk, once nobody reads it any more.
char* ShmBackend::start_chunk(uint32_t chunk, const Call& call) {
  signals_->wait_all(kRead, chunk + 1 - static_cast<uint32_t>(kNumSlots),
                     name_of(static_cast<OpType>(call.operation)));
  slot(rank_, chunk).call = call;
  return staging(rank_, chunk);
}

// Returns what `rank` wrote for the chunk.
const char* ShmBackend::chunk_of(int rank, uint32_t chunk, const Call& call) {
  signals_->wait_rank(kWritten, rank, chunk + 1,
                      name_of(static_cast<OpType>(call.operation)));
  const Call& theirs = slot(rank, chunk).call;
  TORCH_CHECK_WITH(DistBackendError, theirs == call, "ranks of group '",
                   peers_->group_name(),
                   "' are out of step: ", peers_->name(rank_), " calls ",
                   describe(call), " (", describe_wait(""), "), but ",
                   peers_->name(rank), " calls ", describe(theirs));
  return staging(rank, chunk);
}

// Copies every rank's `call.num_bytes` at `input` to outputs[rank].
void ShmBackend::gather(const std::vector<char*>& outputs, const char* input,
                        const Call& call) {
  const char* what = name_of(static_cast<OpType>(call.operation));
  const int64_t chunks = num_chunks(call.num_bytes, kSlotBytes);
  const uint32_t first = next_chunk_;
  next_chunk_ += static_cast<uint32_t>(chunks);
  auto length = [&](int64_t k) {
    return std::min(kSlotBytes, call.num_bytes - k * kSlotBytes);
  };
  auto write = [&](int64_t k) {
    const uint32_t chunk = first + static_cast<uint32_t>(k);
    copy(start_chunk(chunk, call), input + k * kSlotBytes, length(k));
    signals_->post(kWritten, chunk + 1);
    copy(outputs[rank_] + k * kSlotBytes, input + k * kSlotBytes, length(k));
  };
  auto read = [&](int64_t k) {
    const uint32_t chunk = first + static_cast<uint32_t>(k);
    signals_->wait_all(kWritten, chunk + 1, what);
    for (int step = 1; step < size_; ++step) {
      const int rank = (rank_ + step) % size_;
      copy(outputs[rank] + k * kSlotBytes, chunk_of(rank, chunk, call),
           length(k));
    }
    signals_->post(kReduced, chunk + 1);
    signals_->post(kRead, chunk + 1);
  };
  pipeline(chunks, write, read);
}

// Reduces slice `rank_` of every rank's inputs (one per rank) into `output`.
void ShmBackend::reduce_scatter_slices(void* output,
                                       const std::vector<const char*>& inputs,
                                       const Call& call) {
  const char* what = name_of(static_cast<OpType>(call.operation));
  const auto dtype = static_cast<at::ScalarType>(call.dtype);
  const int64_t window = round_down(kSlotBytes / size_, kAlignment);
  const int64_t chunks = num_chunks(call.num_bytes, window);
  const uint32_t first = next_chunk_;
  next_chunk_ += static_cast<uint32_t>(chunks);
  auto length = [&](int64_t k) {
    return std::min(window, call.num_bytes - k * window);
  };
  auto write = [&](int64_t k) {
    const uint32_t chunk = first + static_cast<uint32_t>(k);
    char* slot = start_chunk(chunk, call);
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) continue;
      copy(slot + rank * window, inputs[rank] + k * window, length(k));
    }
    signals_->post(kWritten, chunk + 1);
  };
  std::vector<const void*> sources(size_);
  auto read = [&](int64_t k) {
    const uint32_t chunk = first + static_cast<uint32_t>(k);
    signals_->wait_all(kWritten, chunk + 1, what);
    for (int rank = 0; rank < size_; ++rank) {
      sources[rank] = rank == rank_
                          ? inputs[rank] + k * window
                          : chunk_of(rank, chunk, call) + rank_ * window;
    }
    reduce_slices(static_cast<char*>(output) + k * window, sources, dtype,
                  length(k) / static_cast<int64_t>(c10::elementSize(dtype)),
                  call.reduction);
    signals_->post(kReduced, chunk + 1);
    signals_->post(kRead, chunk + 1);
  };
  pipeline(chunks, write, read);
}

void ShmBackend::reduce_all_small(char* data, const Call& call) {
  const auto dtype = static_cast<at::ScalarType>(call.dtype);
  const uint32_t chunk = next_chunk_++;
  copy(start_chunk(chunk, call), data, call.num_bytes);
  signals_->post(kWritten, chunk + 1);
  signals_->wait_all(kWritten, chunk + 1, "all_reduce");
  std::vector<const void*> sources(size_);
  for (int rank = 0; rank < size_; ++rank) {
    sources[rank] = chunk_of(rank, chunk, call);
  }
  reduce_slices(data, sources, dtype,
                call.num_bytes / static_cast<int64_t>(c10::elementSize(dtype)),
                call.reduction);
  signals_->post(kReduced, chunk + 1);
  signals_->post(kRead, chunk + 1);
}

// Each rank reduces its piece of a chunk into its own slot, where nobody else
// reads that piece before; then all collect the pieces.
void ShmBackend::reduce_all(char* data, const Call& call) {
  const auto dtype = static_cast<at::ScalarType>(call.dtype);
  const int64_t chunks = num_chunks(call.num_bytes, kSlotBytes);
  const uint32_t first = next_chunk_;
  next_chunk_ += static_cast<uint32_t>(chunks);
  auto length = [&](int64_t k) {
    return std::min(kSlotBytes, call.num_bytes - k * kSlotBytes);
  };
  auto write = [&](int64_t k) {
    const uint32_t chunk = first + static_cast<uint32_t>(k);
    copy(start_chunk(chunk, call), data + k * kSlotBytes, length(k));
    signals_->post(kWritten, chunk + 1);
  };
  std::vector<const void*> sources(size_);
  auto read = [&](int64_t k) {
    const uint32_t chunk = first + static_cast<uint32_t>(k);
    const int64_t per_rank =
        round_up((length(k) + size_ - 1) / size_, kAlignment);
    auto begin = [&](int rank) { return std::min(rank * per_rank, length(k)); };
    auto piece = [&](int rank) { return begin(rank + 1) - begin(rank); };
    signals_->wait_all(kWritten, chunk + 1, "all_reduce");
    for (int rank = 0; rank < size_; ++rank) {
      sources[rank] = chunk_of(rank, chunk, call) + begin(rank_);
    }
    reduce_slices(staging(rank_, chunk) + begin(rank_), sources, dtype,
                  piece(rank_) / static_cast<int64_t>(c10::elementSize(dtype)),
                  call.reduction);
    signals_->post(kReduced, chunk + 1);
    signals_->wait_all(kReduced, chunk + 1, "all_reduce");
    for (int rank = 0; rank < size_; ++rank) {
      copy(data + k * kSlotBytes + begin(rank),
           staging(rank, chunk) + begin(rank), piece(rank));
    }
    signals_->post(kRead, chunk + 1);
  };
  pipeline(chunks, write, read);
}

void ShmBackend::synchronize_ranks() {
  const Call call = begin_call(OpType::BARRIER, at::Tensor(), 0);
  CollectiveScope scope("barrier", nullptr, call.sequence);
  gather(std::vector<char*>(size_, nullptr), nullptr, call);
}

std::shared_ptr<internal::SharedMapping> ShmBackend::map_shared(
    int64_t num_bytes) {
  TORCH_CHECK(num_bytes >= 0, "expected a size, got ", num_bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const Call call = begin_call(OpType::UNKNOWN, at::Tensor(), num_bytes);
  CollectiveScope scope("share_memory", nullptr, call.sequence);
  Call announcement = call;
  // Compares the sizes that ranks ask for; no bytes are moved.
  const uint32_t chunk = next_chunk_++;
  start_chunk(chunk, announcement);
  signals_->post(kWritten, chunk + 1);
  signals_->wait_all(kWritten, chunk + 1, "share_memory");
  for (int rank = 0; rank < size_; ++rank) chunk_of(rank, chunk, announcement);
  signals_->post(kReduced, chunk + 1);
  signals_->post(kRead, chunk + 1);
  const size_t mapped =
      internal::round_up_to_pages(static_cast<size_t>(num_bytes));
  return std::make_shared<internal::SharedMapping>(
      peers_->share_memory_file(mapped), mapped);
}

at::Tensor ShmBackend::allocate_shared(int64_t num_bytes) {
  std::shared_ptr<internal::SharedMapping> memory = map_shared(num_bytes);
  return at::from_blob(
      memory->data(), {num_bytes}, [memory](void*) {}, at::kByte);
}

std::vector<at::Tensor> ShmBackend::allocate_symmetric(int64_t num_bytes) {
  const int64_t stride = static_cast<int64_t>(
      internal::round_up_to_pages(static_cast<size_t>(num_bytes)));
  std::shared_ptr<internal::SharedMapping> memory = map_shared(stride * size_);
  std::vector<at::Tensor> regions;
  for (int rank = 0; rank < size_; ++rank) {
    regions.push_back(at::from_blob(
        memory->data() + rank * stride, {num_bytes}, [memory](void*) {},
        at::kByte));
  }
  return regions;
}

std::unique_ptr<ShmSignals> ShmBackend::make_signals(int num_signals) {
  TORCH_CHECK(num_signals > 0, "expected at least one signal");
  const size_t num_bytes =
      internal::round_up_to_pages(ShmSignals::num_bytes(num_signals, size_));
  std::lock_guard<std::mutex> lock(mutex_);
  synchronize_ranks();
  return std::make_unique<ShmSignals>(
      peers_,
      std::make_unique<internal::SharedMapping>(
          peers_->share_memory_file(num_bytes), num_bytes),
      num_signals);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::done(
    OpType operation, std::vector<at::Tensor> results) const {
  return c10::make_intrusive<CompletedWork>(rank_, operation,
                                            std::move(results));
}

c10::intrusive_ptr<c10d::Work> ShmBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  check_single(tensors.size(), "broadcast");
  check_tensor(tensors[0], "broadcast");
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_,
              "shm broadcast: expected a root below ", size_, ", got ",
              options.rootRank);
  std::lock_guard<std::mutex> lock(mutex_);
  TimeoutGuard timeout(*peers_, options.timeout);
  const int root = static_cast<int>(options.rootRank);
  const int64_t num_bytes = size_of(tensors[0]);
  const Call call = begin_call(OpType::BROADCAST, tensors[0], num_bytes,
                               /*reduction=*/0, root);
  CollectiveScope scope("broadcast", nullptr, call.sequence);
  char* data = bytes_of(tensors[0]);
  const int64_t chunks = num_chunks(num_bytes, kSlotBytes);
  for (int64_t k = 0; k < chunks; ++k) {
    const uint32_t chunk = next_chunk_++;
    const int64_t length = std::min(kSlotBytes, num_bytes - k * kSlotBytes);
    char* slot = start_chunk(chunk, call);
    if (rank_ == root) copy(slot, data + k * kSlotBytes, length);
    signals_->post(kWritten, chunk + 1);
    if (rank_ != root) {
      copy(data + k * kSlotBytes, chunk_of(root, chunk, call), length);
    }
    signals_->post(kReduced, chunk + 1);
    signals_->post(kRead, chunk + 1);
  }
  return done(OpType::BROADCAST, tensors);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  check_single(tensors.size(), "all_reduce");
  check_tensor(tensors[0], "all_reduce");
  check_reduction(options.reduceOp, tensors[0].scalar_type(), "all_reduce");
  std::lock_guard<std::mutex> lock(mutex_);
  TimeoutGuard timeout(*peers_, options.timeout);
  const Call call = begin_call(OpType::ALLREDUCE, tensors[0],
                               size_of(tensors[0]), options.reduceOp.op_);
  CollectiveScope scope("all_reduce", nullptr, call.sequence);
  if (call.num_bytes <= kSmallReductionBytes) {
    reduce_all_small(bytes_of(tensors[0]), call);
  } else {
    reduce_all(bytes_of(tensors[0]), call);
  }
  return done(OpType::ALLREDUCE, tensors);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceCoalescedOptions& options) {
  for (at::Tensor& tensor : tensors) {
    std::vector<at::Tensor> one = {tensor};
    allreduce(one, options);
  }
  return done(OpType::ALLREDUCE_COALESCED, tensors);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  check_single(inputs.size(), "all_gather");
  check_single(outputs.size(), "all_gather");
  TORCH_CHECK(outputs[0].size() == static_cast<size_t>(size_),
              "shm all_gather: expected ", size_, " outputs, got ",
              outputs[0].size());
  check_tensor(inputs[0], "all_gather");
  at::Tensor input = inputs[0];
  std::vector<char*> pointers;
  for (int rank = 0; rank < size_; ++rank) {
    const at::Tensor& output = outputs[0][rank];
    check_tensor(output, "all_gather");
    TORCH_CHECK(output.scalar_type() == input.scalar_type() &&
                    output.numel() == input.numel(),
                "shm all_gather: expected outputs of ", input.numel(), " ",
                input.scalar_type(), ", got ", output.numel(), " ",
                output.scalar_type(), " for ", peers_->name(rank));
    pointers.push_back(bytes_of(output));
    const bool own = rank == rank_ && bytes_of(output) == bytes_of(input);
    if (!own && overlap(bytes_of(output), size_of(output), bytes_of(input),
                        size_of(input))) {
      input = inputs[0].clone();
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TimeoutGuard timeout(*peers_, options.timeout);
  const Call call = begin_call(OpType::_ALLGATHER_BASE, input, size_of(input));
  CollectiveScope scope("all_gather", nullptr, call.sequence);
  gather(pointers, bytes_of(input), call);
  return done(OpType::ALLGATHER, outputs[0]);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  check_tensor(output, "all_gather");
  check_tensor(input, "all_gather");
  TORCH_CHECK(output.scalar_type() == input.scalar_type() &&
                  output.numel() == input.numel() * size_,
              "shm all_gather: expected an output of ", size_, " x ",
              input.numel(), " ", input.scalar_type(), ", got ", output.numel(),
              " ", output.scalar_type());
  const int64_t num_bytes = size_of(input);
  std::vector<char*> pointers;
  for (int rank = 0; rank < size_; ++rank) {
    pointers.push_back(bytes_of(output) + rank * num_bytes);
  }
  at::Tensor source = input;
  if (bytes_of(input) != pointers[rank_] &&
      overlap(bytes_of(output), size_of(output), bytes_of(input), num_bytes)) {
    source = input.clone();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TimeoutGuard timeout(*peers_, options.timeout);
  const Call call = begin_call(OpType::_ALLGATHER_BASE, input, num_bytes);
  CollectiveScope scope("all_gather", nullptr, call.sequence);
  gather(pointers, bytes_of(source), call);
  return done(OpType::_ALLGATHER_BASE, {output});
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "shm all_gather: expected ",
              inputs.size(), " outputs, got ", outputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    _allgather_base(outputs[i], inputs[i], options);
  }
  return done(OpType::COALESCED, outputs);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_single(outputs.size(), "reduce_scatter");
  check_single(inputs.size(), "reduce_scatter");
  TORCH_CHECK(inputs[0].size() == static_cast<size_t>(size_),
              "shm reduce_scatter: expected ", size_, " inputs, got ",
              inputs[0].size());
  at::Tensor& output = outputs[0];
  check_tensor(output, "reduce_scatter");
  check_reduction(options.reduceOp, output.scalar_type(), "reduce_scatter");
  std::vector<at::Tensor> sources = inputs[0];
  std::vector<const char*> pointers;
  for (at::Tensor& source : sources) {
    check_tensor(source, "reduce_scatter");
    TORCH_CHECK(source.scalar_type() == output.scalar_type() &&
                    source.numel() == output.numel(),
                "shm reduce_scatter: expected inputs of ", output.numel(), " ",
                output.scalar_type(), ", got ", source.numel(), " ",
                source.scalar_type());
    if (bytes_of(source) != bytes_of(output) &&
        overlap(bytes_of(source), size_of(source), bytes_of(output),
                size_of(output))) {
      source = source.clone();
    }
    pointers.push_back(bytes_of(source));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TimeoutGuard timeout(*peers_, options.timeout);
  const Call call = begin_call(OpType::_REDUCE_SCATTER_BASE, output,
                               size_of(output), options.reduceOp.op_);
  CollectiveScope scope("reduce_scatter", nullptr, call.sequence);
  reduce_scatter_slices(bytes_of(output), pointers, call);
  return done(OpType::REDUCE_SCATTER, outputs);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  check_tensor(input, "reduce_scatter");
  TORCH_CHECK(input.numel() == output.numel() * size_,
              "shm reduce_scatter: expected an input of ", size_, " x ",
              output.numel(), " elements, got ", input.numel());
  std::vector<std::vector<at::Tensor>> inputs(1);
  const at::Tensor flat = input.view({-1});
  for (int rank = 0; rank < size_; ++rank) {
    inputs[0].push_back(flat.narrow(0, rank * output.numel(), output.numel()));
  }
  std::vector<at::Tensor> outputs = {output};
  return reduce_scatter(outputs, inputs, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "shm reduce_scatter: expected ",
              inputs.size(), " outputs, got ", outputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    _reduce_scatter_base(outputs[i], inputs[i], options);
  }
  return done(OpType::COALESCED, outputs);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::barrier(
    const c10d::BarrierOptions& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  TimeoutGuard timeout(*peers_, options.timeout);
  synchronize_ranks();
  return done(OpType::BARRIER, {});
}

}  // namespace fullshard
