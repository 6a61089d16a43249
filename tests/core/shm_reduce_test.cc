#include "fullshard/core/shm_reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "c10/util/BFloat16.h"
#include "c10/util/Exception.h"
#include "c10/util/Half.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using at::BFloat16;
using at::Half;

template <typename T>
constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;

float sample(int source, int64_t i) {
  return std::sin(0.37f * static_cast<float>(i) + static_cast<float>(source)) *
         (i % 7 == 0 ? 1000.0f : 1.0f);
}

template <typename Out, typename Source>
void check_sum(int num_sources, int64_t numel, float scale, bool accumulate) {
  std::vector<std::vector<Source>> data(num_sources);
  std::vector<const void*> sources;
  for (int s = 0; s < num_sources; ++s) {
    // One element in, so that nothing is aligned to a vector.
    for (int64_t i = 0; i <= numel; ++i) {
      data[s].push_back(static_cast<Source>(sample(s, i)));
    }
    sources.push_back(data[s].data() + 1);
  }
  std::vector<Out> out(numel + 2, static_cast<Out>(3.0f));
  sum_slices(out.data() + 1, kType<Out>, sources, kType<Source>, numel, scale,
             accumulate);
  using Sum = std::conditional_t<std::is_same_v<Source, double>, double, float>;
  for (int64_t i = 0; i < numel; ++i) {
    Sum sum = static_cast<Sum>(data[0][i + 1]);
    for (int s = 1; s < num_sources; ++s) {
      sum += static_cast<Sum>(data[s][i + 1]);
    }
    sum *= static_cast<Sum>(scale);
    if (accumulate) sum += static_cast<Sum>(3.0f);
    const Out expected = static_cast<Out>(sum);
    ASSERT_EQ(std::memcmp(&out[i + 1], &expected, sizeof(Out)), 0)
        << num_sources << " sources, element " << i << " of " << numel;
  }
  EXPECT_EQ(static_cast<float>(out[0]), 3.0f);
  EXPECT_EQ(static_cast<float>(out[numel + 1]), 3.0f);
}

template <typename Out, typename Source>
void check_sums() {
  for (int num_sources : {1, 2, 3, 4, 5, 8, 11}) {
    for (int64_t numel : {0, 1, 15, 16, 17, 333}) {
      check_sum<Out, Source>(num_sources, numel, 1.0f, false);
      check_sum<Out, Source>(num_sources, numel, 1.0f / 3, true);
    }
  }
}

TEST(SumSlicesTest, FloatIntoFloat) { check_sums<float, float>(); }
TEST(SumSlicesTest, DoubleIntoDouble) { check_sums<double, double>(); }
TEST(SumSlicesTest, BFloat16IntoBFloat16) { check_sums<BFloat16, BFloat16>(); }
TEST(SumSlicesTest, HalfIntoHalf) { check_sums<Half, Half>(); }
TEST(SumSlicesTest, BFloat16IntoFloat) { check_sums<float, BFloat16>(); }
TEST(SumSlicesTest, HalfIntoFloat) { check_sums<float, Half>(); }
TEST(SumSlicesTest, FloatIntoBFloat16) { check_sums<BFloat16, float>(); }
TEST(SumSlicesTest, FloatIntoHalf) { check_sums<Half, float>(); }
TEST(SumSlicesTest, FloatIntoDouble) { check_sums<double, float>(); }

TEST(SumSlicesTest, OutputMayBeASource) {
  std::vector<float> a(100, 1.0f), b(100, 2.0f);
  sum_slices(a.data(), at::kFloat, {b.data(), a.data()}, at::kFloat, 100, 1.0f,
             /*accumulate=*/false);
  for (float value : a) ASSERT_EQ(value, 3.0f);
}

TEST(SumSlicesTest, InfinityAndNanSurviveHalfTypes) {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> a(32, 1.0f), b(32, 2.0f);
  a[3] = inf;
  a[5] = std::nanf("");
  a[20] = 1e30f;
  std::vector<BFloat16> bf16(32);
  std::vector<Half> half(32);
  sum_slices(bf16.data(), at::kBFloat16, {a.data(), b.data()}, at::kFloat, 32,
             1.0f, false);
  sum_slices(half.data(), at::kHalf, {a.data(), b.data()}, at::kFloat, 32, 1.0f,
             false);
  EXPECT_EQ(static_cast<float>(bf16[3]), inf);
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16[5])));
  EXPECT_TRUE(std::isnan(static_cast<float>(half[5])));
  EXPECT_EQ(static_cast<float>(half[20]), inf);
}

TEST(SumSlicesTest, Int64IsExact) {
  std::vector<int64_t> a = {(int64_t{1} << 60) + 1, -5}, b = {1, 3}, out(2);
  sum_slices(out.data(), at::kLong, {a.data(), b.data()}, at::kLong, 2, 1.0f,
             false);
  EXPECT_EQ(out, (std::vector<int64_t>{(int64_t{1} << 60) + 2, -2}));
}

TEST(SumSlicesTest, RefusesOtherTypes) {
  int32_t value = 1;
  EXPECT_THROW(sum_slices(&value, at::kInt, {&value}, at::kInt, 1, 1.0f, false),
               c10::Error);
  EXPECT_THROW(
      sum_slices(&value, at::kInt, {&value}, at::kFloat, 1, 1.0f, false),
      c10::Error);
  EXPECT_THROW(sum_slices(&value, at::kFloat, {}, at::kFloat, 1, 1.0f, false),
               c10::Error);
}

TEST(ExtremeSlicesTest, TakesTheLargestAndTheSmallest) {
  std::vector<float> a = {1, 5, -2}, b = {4, 0, -3}, out(3);
  max_slices(out.data(), {a.data(), b.data()}, at::kFloat, 3);
  EXPECT_EQ(out, (std::vector<float>{4, 5, -2}));
  min_slices(out.data(), {a.data(), b.data()}, at::kFloat, 3);
  EXPECT_EQ(out, (std::vector<float>{1, 0, -3}));
}

}  // namespace
}  // namespace fullshard
