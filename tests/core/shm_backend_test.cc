#include "fullshard/core/shm_backend.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "fullshard/tests/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using c10d::ReduceOp;
using testing::run_ranks;
using testing::RunRanksOptions;

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kBFloat16,
                                     at::kHalf, at::kLong};

// Empty, tiny, and odd ones below and above a staging slot of 256 KiB.
constexpr int64_t kSizes[] = {0, 1, 7, 1000, 20001, 300003};

// Small integers, which every dtype holds exactly, and so do their sums.
at::Tensor values(int rank, int64_t numel, at::ScalarType dtype,
                  int64_t offset = 0) {
  at::Tensor index = at::arange(offset, offset + numel, at::kLong);
  return index.mul(7 + rank).add(rank * 3).remainder(31).sub(15).to(dtype);
}

// Uninitialised memory that starts `misalignment` elements into a storage.
at::Tensor unaligned(int64_t numel, at::ScalarType dtype,
                     int64_t misalignment) {
  return at::full({numel + misalignment}, 99, dtype)
      .narrow(0, misalignment, numel);
}

at::Tensor unaligned_copy(const at::Tensor& from, int64_t misalignment) {
  at::Tensor copy = unaligned(from.numel(), from.scalar_type(), misalignment);
  copy.copy_(from);
  return copy;
}

at::Tensor reduced(int num_ranks, int64_t numel, at::ScalarType dtype,
                   ReduceOp::RedOpType op, int64_t offset = 0) {
  std::vector<at::Tensor> all;
  for (int r = 0; r < num_ranks; ++r) {
    all.push_back(values(r, numel, at::kDouble, offset));
  }
  at::Tensor stacked = at::stack(all);
  if (op == ReduceOp::MAX) return stacked.amax(0).to(dtype);
  if (op == ReduceOp::MIN) return stacked.amin(0).to(dtype);
  at::Tensor sum = stacked.sum(0);
  if (op == ReduceOp::AVG) sum = sum.div(num_ranks);
  return (dtype == at::kLong ? sum.trunc() : sum).to(dtype);
}

void expect_equal(const at::Tensor& got, const at::Tensor& expected,
                  const std::string& what) {
  ASSERT_EQ(got.numel(), expected.numel()) << what;
  // An average is rounded once here and twice there.
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected.to(at::kDouble),
                           got.scalar_type() == at::kBFloat16 ? 0.008 : 0.001,
                           1e-6))
      << what;
}

template <typename Check>
void for_each_case(const Check& check) {
  for (at::ScalarType dtype : kTypes) {
    for (int64_t numel : kSizes) {
      for (int64_t misalignment : {0, 3}) {
        if (numel > 20001 && (dtype != at::kFloat || misalignment == 0)) {
          continue;
        }
        check(dtype, numel, misalignment);
      }
    }
  }
}

std::string describe(at::ScalarType dtype, int64_t numel, int64_t misalignment,
                     int op = 0) {
  return std::string(c10::toString(dtype)) + " x " + std::to_string(numel) +
         " at " + std::to_string(misalignment) + " op " + std::to_string(op);
}

class ShmBackendTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, ShmBackendTest, ::testing::Values(1, 2, 3, 4));

TEST_P(ShmBackendTest, AllGatherBase) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    for_each_case([&](at::ScalarType dtype, int64_t numel, int64_t skew) {
      at::Tensor input =
          unaligned_copy(values(groups.rank(), numel, dtype), skew);
      at::Tensor output = unaligned(numel * n, dtype, skew);
      groups.world()->_allgather_base(output, input)->wait();
      for (int r = 0; r < n; ++r) {
        EXPECT_TRUE(
            output.narrow(0, r * numel, numel).equal(values(r, numel, dtype)))
            << describe(dtype, numel, skew) << " from rank " << r;
      }
    });
  });
}

TEST_P(ShmBackendTest, AllGatherInPlace) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    for (int64_t numel : kSizes) {
      at::Tensor output = at::zeros({numel * n});
      at::Tensor input = output.narrow(0, groups.rank() * numel, numel);
      input.copy_(values(groups.rank(), numel, at::kFloat));
      groups.world()->_allgather_base(output, input)->wait();
      for (int r = 0; r < n; ++r) {
        EXPECT_TRUE(output.narrow(0, r * numel, numel)
                        .equal(values(r, numel, at::kFloat)));
      }
    }
  });
}

TEST_P(ShmBackendTest, AllGatherFromAnotherRanksSlice) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    constexpr int64_t kNumel = 300001;
    at::Tensor output = at::zeros({kNumel * n});
    at::Tensor input =
        output.narrow(0, (groups.rank() + 1) % n * kNumel, kNumel);
    input.copy_(values(groups.rank(), kNumel, at::kFloat));
    groups.world()->_allgather_base(output, input)->wait();
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(output.narrow(0, r * kNumel, kNumel)
                      .equal(values(r, kNumel, at::kFloat)));
    }
  });
}

TEST_P(ShmBackendTest, AllGatherIntoList) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    std::vector<at::Tensor> inputs = {values(groups.rank(), 1234, at::kInt)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int r = 0; r < n; ++r) {
      outputs[0].push_back(at::empty({1234}, at::kInt));
    }
    groups.world()->allgather(outputs, inputs)->wait();
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(outputs[0][r].equal(values(r, 1234, at::kInt)));
    }
  });
}

TEST_P(ShmBackendTest, ReduceScatterBase) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    for_each_case([&](at::ScalarType dtype, int64_t numel, int64_t skew) {
      for (auto op :
           {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX, ReduceOp::MIN}) {
        if (numel > 1000 && op != ReduceOp::SUM) continue;
        at::Tensor input =
            unaligned_copy(values(groups.rank(), numel * n, dtype), skew);
        at::Tensor output = unaligned(numel, dtype, skew);
        c10d::ReduceScatterOptions options;
        options.reduceOp = op;
        groups.world()->_reduce_scatter_base(output, input, options)->wait();
        expect_equal(output,
                     reduced(n, numel, dtype, op, groups.rank() * numel),
                     describe(dtype, numel, skew, op));
      }
    });
  });
}

TEST_P(ShmBackendTest, ReduceScatterInPlace) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    constexpr int64_t kNumel = 300001;
    for (int place : {0, groups.rank(), n - 1}) {
      at::Tensor input = values(groups.rank(), kNumel * n, at::kFloat);
      at::Tensor output = input.narrow(0, place * kNumel, kNumel);
      groups.world()->_reduce_scatter_base(output, input)->wait();
      EXPECT_TRUE(output.equal(reduced(n, kNumel, at::kFloat, ReduceOp::SUM,
                                       groups.rank() * kNumel)));
    }
    at::Tensor input = values(groups.rank(), kNumel * n, at::kFloat);
    at::Tensor shifted = input.narrow(0, n > 1 ? 5 : 0, kNumel);
    groups.world()->_reduce_scatter_base(shifted, input)->wait();
    EXPECT_TRUE(shifted.equal(
        reduced(n, kNumel, at::kFloat, ReduceOp::SUM, groups.rank() * kNumel)));
  });
}

TEST_P(ShmBackendTest, AllReduce) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    for_each_case([&](at::ScalarType dtype, int64_t numel, int64_t skew) {
      for (auto op :
           {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX, ReduceOp::MIN}) {
        if (numel > 1000 && op != ReduceOp::SUM) continue;
        std::vector<at::Tensor> tensors = {
            unaligned_copy(values(groups.rank(), numel, dtype), skew)};
        c10d::AllreduceOptions options;
        options.reduceOp = op;
        groups.world()->allreduce(tensors, options)->wait();
        expect_equal(tensors[0], reduced(n, numel, dtype, op),
                     describe(dtype, numel, skew, op));
      }
    });
  });
}

TEST_P(ShmBackendTest, Broadcast) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    for (int root = 0; root < groups.world_size(); ++root) {
      for (int64_t numel : kSizes) {
        std::vector<at::Tensor> tensors = {
            unaligned_copy(values(groups.rank(), numel, at::kBFloat16), 1)};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        groups.world()->broadcast(tensors, options)->wait();
        EXPECT_TRUE(tensors[0].equal(values(root, numel, at::kBFloat16)));
      }
    }
  });
}

// Collectives of every kind one after the other, without waits between them.
TEST_P(ShmBackendTest, ManySmallCollectivesInARow) {
  run_ranks(GetParam(), [](ProcessGroups& groups) {
    const int n = groups.world_size();
    for (int i = 0; i < 300; ++i) {
      std::vector<at::Tensor> sum = {at::full({3}, groups.rank() + i)};
      groups.world()->allreduce(sum);
      ASSERT_EQ(sum[0][1].item<int64_t>(), n * i + n * (n - 1) / 2);
      std::vector<at::Tensor> news = {at::full({2}, groups.rank() * 1000 + i)};
      c10d::BroadcastOptions options;
      options.rootRank = i % n;
      groups.world()->broadcast(news, options);
      ASSERT_EQ(news[0][0].item<int64_t>(), i % n * 1000 + i);
      if (i % 16 == 0) groups.world()->barrier();
    }
  });
}

TEST(ShmBackendEightRanksTest, EveryCollective) {
  run_ranks(8, [](ProcessGroups& groups) {
    const int rank = groups.rank();
    for (int64_t numel : {1, 1000, 100003}) {
      at::Tensor slice = values(rank, numel, at::kBFloat16);
      at::Tensor gathered = at::empty({numel * 8}, at::kBFloat16);
      groups.world()->_allgather_base(gathered, slice);
      at::Tensor full = values(rank, numel * 8, at::kFloat);
      at::Tensor scattered = at::empty({numel});
      groups.world()->_reduce_scatter_base(scattered, full);
      std::vector<at::Tensor> sum = {values(rank, numel, at::kDouble)};
      groups.world()->allreduce(sum);
      for (int r = 0; r < 8; ++r) {
        EXPECT_TRUE(gathered.narrow(0, r * numel, numel)
                        .equal(values(r, numel, at::kBFloat16)));
      }
      EXPECT_TRUE(scattered.equal(
          reduced(8, numel, at::kFloat, ReduceOp::SUM, rank * numel)));
      EXPECT_TRUE(sum[0].equal(reduced(8, numel, at::kDouble, ReduceOp::SUM)));
    }
  });
}

TEST(ShmBackendSumTest, HalfTypesAreSummedInFloat) {
  run_ranks(4, [](ProcessGroups& groups) {
    // 64.75, rounded once. In bfloat16, 256 + 1 + 1 + 1 would stay 256.
    at::Tensor input =
        at::full({8}, groups.rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
    at::Tensor output = at::empty({2}, at::kBFloat16);
    c10d::ReduceScatterOptions options;
    options.reduceOp = ReduceOp::AVG;
    groups.world()->_reduce_scatter_base(output, input, options);
    EXPECT_EQ(output[0].item<float>(), 65.0f);
  });
}

TEST(ShmBackendSumTest, SumsAreTakenInRankOrder) {
  run_ranks(3, [](ProcessGroups& groups) {
    const float parts[] = {1e8f, 1.0f, -1e8f};
    for (int64_t numel : {5, 50000}) {
      std::vector<at::Tensor> tensors = {
          at::full({numel}, parts[groups.rank()])};
      groups.world()->allreduce(tensors);
      // 1e8 + 1 rounds to 1e8, so any other order gives 1.
      EXPECT_EQ(tensors[0].abs().max().item<float>(), 0.0f);
    }
  });
}

TEST(ShmBackendSumTest, MaximumKeepsNan) {
  run_ranks(3, [](ProcessGroups& groups) {
    for (int bad = 0; bad < 3; ++bad) {
      std::vector<at::Tensor> tensors = {
          at::full({4}, groups.rank() == bad ? std::nan("") : groups.rank(),
                   at::kFloat)};
      c10d::AllreduceOptions options;
      options.reduceOp = ReduceOp::MAX;
      groups.world()->allreduce(tensors, options);
      EXPECT_TRUE(std::isnan(tensors[0][2].item<float>()));
    }
  });
}

TEST(ShmBackendGroupsTest, GroupsWorkSideBySide) {
  RunRanksOptions options;
  options.shard_group_size = 2;
  run_ranks(
      4,
      [](ProcessGroups& groups) {
        const int rank = groups.rank();
        for (int i = 0; i < 20; ++i) {
          std::vector<at::Tensor> shard = {at::full({50000}, rank)};
          std::vector<at::Tensor> replicate = {at::full({50000}, rank)};
          std::vector<at::Tensor> world = {at::full({50000}, rank)};
          groups.shard_group()->allreduce(shard);
          groups.replicate_group()->allreduce(replicate);
          groups.world()->allreduce(world);
          ASSERT_EQ(shard[0][7].item<int64_t>(), rank / 2 == 0 ? 1 : 5);
          ASSERT_EQ(replicate[0][7].item<int64_t>(), rank % 2 == 0 ? 2 : 4);
          ASSERT_EQ(world[0][7].item<int64_t>(), 6);
        }
      },
      options);
}

TEST(ShmBackendMemoryTest, SharedRegionIsOneForAll) {
  run_ranks(3, [](ProcessGroups& groups) {
    ShmBackend* shm = ProcessGroups::shm(groups.world());
    ASSERT_NE(shm, nullptr);
    at::Tensor region = shm->allocate_shared(3 * 4000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(region.data_ptr()) % 4096, 0u);
    at::Tensor floats = region.view(at::kFloat);
    EXPECT_EQ(floats.abs().sum().item<float>(), 0);
    groups.world()->barrier();
    floats.narrow(0, groups.rank() * 1000, 1000).fill_(groups.rank() + 1);
    groups.world()->barrier();
    EXPECT_EQ(floats.sum().item<float>(), 6000);
    EXPECT_EQ(shm->allocate_shared(0).numel(), 0);
  });
}

TEST(ShmBackendMemoryTest, SymmetricRegionsBelongToRanks) {
  run_ranks(3, [](ProcessGroups& groups) {
    ShmBackend* shm = ProcessGroups::shm(groups.world());
    std::vector<at::Tensor> regions = shm->allocate_symmetric(5000);
    std::unique_ptr<ShmSignals> signals = shm->make_signals(2);
    ASSERT_EQ(regions.size(), 3u);
    regions[groups.rank()].fill_(groups.rank() + 1);
    signals->post(1, 1, /*tag=*/groups.rank() + 40);
    signals->wait_all(1, 1, "test");
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(regions[r].numel(), 5000);
      EXPECT_EQ(regions[r][4999].item<int>(), r + 1);
      EXPECT_EQ(signals->tag(1, r), static_cast<uint32_t>(r + 40));
      EXPECT_EQ(signals->value(0, r), 0u);
    }
  });
}

TEST(ShmSignalsTest, CountersMayWrap) {
  run_ranks(2, [](ProcessGroups& groups) {
    std::unique_ptr<ShmSignals> signals =
        ProcessGroups::shm(groups.world())->make_signals(1);
    for (uint32_t value : {0x7fffffffu, 0xfffffff0u, 5u}) {
      signals->post(0, value);
      signals->wait_all(0, value, "wrap");
      EXPECT_FALSE(signals->reached(0, groups.rank(), value + 1));
      groups.world()->barrier();
    }
  });
}

TEST(ShmBackendErrorTest, RanksOutOfStepAreNamed) {
  auto outcomes = testing::collect_ranks(3, [](ProcessGroups& groups) {
    std::vector<at::Tensor> tensors = {at::zeros({groups.rank() == 1 ? 8 : 4})};
    groups.world()->allreduce(tensors);
  });
  EXPECT_EQ(outcomes[0].exit_code, 1);
  EXPECT_EQ(outcomes[1].exit_code, 1);
  EXPECT_NE(outcomes[0].output.find("out of step"), std::string::npos)
      << outcomes[0].output;
  EXPECT_NE(outcomes[0].output.find(
                "rank 1 calls all_reduce #1 of 32 bytes per rank, Float, sum"),
            std::string::npos)
      << outcomes[0].output;
}

TEST(ShmBackendErrorTest, RefusesWhatItCannotReduce) {
  run_ranks(2, [](ProcessGroups& groups) {
    std::vector<at::Tensor> tensors = {at::zeros({4}, at::kInt)};
    EXPECT_THROW(groups.world()->allreduce(tensors), c10::Error);
    tensors = {at::zeros({4, 4}).t()};
    EXPECT_NO_THROW(groups.world()->barrier());
    tensors = {at::zeros({4, 3}).t()};
    EXPECT_THROW(groups.world()->allreduce(tensors), c10::Error);
    tensors = {at::zeros({4})};
    c10d::AllreduceOptions options;
    options.reduceOp = ReduceOp::PRODUCT;
    EXPECT_THROW(groups.world()->allreduce(tensors, options), c10::Error);
    at::Tensor output = at::zeros({7}), input = at::zeros({4});
    EXPECT_THROW(groups.world()->_allgather_base(output, input), c10::Error);
    groups.world()->barrier();
  });
}

}  // namespace
}  // namespace fullshard
